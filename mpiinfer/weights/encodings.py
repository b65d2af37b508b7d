"""How stored elements are packed into bytes. A table of facts; decoding is in decode.py.

Numbers and sizes: the GGUF specification and the headers of ggml. A quantised row is a whole number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Encoding:
    """`block` consecutive elements of a row take `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int

    @property
    def is_quantised(self) -> bool:
        return self.block > 1

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of `num_elements`; of part of a block, the share that falls to it, rounded up."""
        return -(-num_elements * self.block_bytes // self.block)


# What safetensors files may hold, by their name of the dtype. GGUF files use the same four.
DENSE = {name: Encoding(name, 1, size) for name, size in {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}.items()}

# GGUF's number of a type -> how it is packed.
_QUANTISED: dict[int, Encoding] = {
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    10: Encoding("Q2_K", 256, 84),
    11: Encoding("Q3_K", 256, 110),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    16: Encoding("IQ2_XXS", 256, 66),
    17: Encoding("IQ2_XS", 256, 74),
    18: Encoding("IQ3_XXS", 256, 98),
    19: Encoding("IQ1_S", 256, 50),
    20: Encoding("IQ4_NL", 32, 18),
    21: Encoding("IQ3_S", 256, 110),
    22: Encoding("IQ2_S", 256, 82),
    23: Encoding("IQ4_XS", 256, 136),
    29: Encoding("IQ1_M", 256, 56),
    34: Encoding("TQ1_0", 256, 54),
    35: Encoding("TQ2_0", 256, 66),
    39: Encoding("MXFP4", 32, 17),
    40: Encoding("NVFP4", 64, 36),
}
GGUF_ENCODINGS: dict[int, Encoding] = {
    0: DENSE["F32"],
    1: DENSE["F16"],
    28: DENSE["F64"],
    30: DENSE["BF16"],
    **_QUANTISED,
}
# Types that exist and that nothing here can decode: an error may as well name them.
GGUF_UNREADABLE = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 41: "Q1_0"}
