"""Stored bytes to numbers: one part of a tensor at a time.

Promises: the values of the Hugging Face layout, whatever the file's. Dense encodings are views of the bytes without a
copy; quantised ones go through the gguf package, which is imported when the first of them is met. Blocks that a weight
can hold as they are come out as blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mpiinfer.errors import CheckpointError
from mpiinfer.model.quantised import BLOCK, Blocks
from mpiinfer.weights.slices import Read

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

# Encodings that come out as blocks of 32, and the bits of a number.
BLOCK_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


def decode(read: Read, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    """The values of `read`, whose bytes are `raw` (uint8, row parts packed one after another).

    [num_rows, num_columns], or [num_columns] of a vector; float32 of a quantised encoding, else the stored dtype. May
    share the memory of `raw`.
    """
    if read.entry.encoding.is_quantised:
        decoded = _dequantise(read, raw)
    else:
        decoded = torch.from_numpy(raw).view(_DTYPES[read.entry.encoding.name])
    values = decoded.view(read.num_rows, -1)[:, read.skip : read.skip + read.num_columns]
    if read.is_vector:
        values = values[0]
    return _unpaired(values, read.entry.paired_head_dim)


def decode_blocks(read: Read, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> Blocks:
    """The blocks of `read`, an encoding of BLOCK_BITS: all that its columns touch, those of `read.skip` included.

    Layout of a block, after ggml: d in half precision, of Q4_1 then m; then 32 signed bytes, or 16 bytes whose low
    halves are the first 16 numbers and whose high halves the others.
    """
    encoding = read.entry.encoding
    head = read.entry.paired_head_dim
    parts = torch.from_numpy(raw).view(read.num_rows, -1, encoding.block_bytes)
    num_halves = 2 if encoding.name == "Q4_1" else 1
    halves = parts[:, :, : 2 * num_halves].contiguous().view(torch.float16)
    packed = parts[:, :, 2 * num_halves :]
    if encoding.name == "Q8_0":
        q = packed ^ 128  # a signed byte, and 128 more
    else:
        q = torch.cat((packed & 15, packed >> 4), dim=2)
    assert q.shape[2] == BLOCK
    d, m = halves[:, :, 0], halves[:, :, 1] if num_halves == 2 else None
    return Blocks(
        _unpaired(q, head),
        _unpaired(d, head),
        None if m is None else _unpaired(m, head),
        0 if num_halves == 2 else 1 << (BLOCK_BITS[encoding.name] - 1),
    )


def _unpaired(values: torch.Tensor, head: int) -> torch.Tensor:
    """Stored row 2i + s of a head belongs at i + s * head / 2 (head: 0 where rows are in order)."""
    if not head:
        return values
    return values.reshape(-1, head // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def _dequantise(read: Read, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    name = read.entry.encoding.name
    quants = _gguf_quants()
    try:
        # One long row: the package loops over groups of rows in Python.
        values = quants.dequantize(raw.reshape(1, -1), quants.GGMLQuantizationType[name])
    except (KeyError, NotImplementedError):
        raise CheckpointError(
            f"{read.entry} is {name}, which the installed gguf package cannot decode: pip install --upgrade gguf"
        ) from None
    return torch.from_numpy(values)


@lru_cache(maxsize=1)
def _gguf_quants() -> Any:
    from gguf import quants

    return quants
