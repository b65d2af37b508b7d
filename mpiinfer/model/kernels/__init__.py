"""C++ kernels of CPUs, called through ctypes; each has a torch form beside its caller that says what it computes.

Promises: `library()` is None where nothing was compiled, and then all works without it; the library of the best
instruction set that this CPU has is taken. Tensors are handed over by address: callers see to shape, dtype and layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from mpiinfer.model.kernels.build import HERE, instruction_sets

CPUINFO = Path("/proc/cpuinfo")
# What a library needs of the CPU, by names of /proc/cpuinfo.
NEEDED_FLAGS = {
    "v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}),
    "v3": frozenset({"avx2", "fma", "f16c", "bmi2"}),
    "base": frozenset[str](),
}

# Argument types by letter: p a tensor's address, i int64, f float32.
_TYPES: dict[str, type] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
# Each function's arguments, as in its source.
SIGNATURES = {
    "add_rms_norm": "ppppiif",
    "attend": "ppppppiiiiiiiiifi",
    "linear_bf16": "pppiiii",
    "linear_fp16": "pppiiii",
    "linear_fp32": "pppiiii",
    "linear_int4": "pppiiiiii",
    "linear_int8": "pppiiiiii",
    "rotate_and_store": "ppppppppiiiiif",
    "silu_multiply": "ppii",
}

Function = Callable[..., None]


class Library:
    """The functions of one compiled library, as attributes. `name`: its instruction set."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem.removeprefix("kernels-")
        loaded = ctypes.CDLL(str(path))
        for name, letters in SIGNATURES.items():
            try:
                function = getattr(loaded, name)
            except AttributeError:
                raise RuntimeError(
                    f"{path} is older than its sources: run python -m mpiinfer.model.kernels.build"
                ) from None
            function.argtypes = [_TYPES[letter] for letter in letters]
            function.restype = None
            setattr(self, name, function)

    add_rms_norm: Function
    attend: Function
    linear_bf16: Function
    linear_fp16: Function
    linear_fp32: Function
    linear_int4: Function
    linear_int8: Function
    rotate_and_store: Function
    silu_multiply: Function


def usable_libraries() -> list[Path]:
    """Compiled libraries that this CPU can run, the best first."""
    flags = _cpu_flags()
    paths = [HERE / f"kernels-{name}.so" for name in instruction_sets() if NEEDED_FLAGS[name] <= flags]
    return [path for path in paths if path.exists()]


@lru_cache(maxsize=1)
def library() -> Library | None:
    """The best library of this machine, loaded once; None where there is none."""
    paths = usable_libraries()
    return Library(paths[0]) if paths else None


def _cpu_flags() -> frozenset[str]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
