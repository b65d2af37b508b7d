"""Stored bytes to numbers: one part of a tensor at a time.

Promises: the values of the Hugging Face layout, whatever the file's. Dense encodings are views of the bytes without a
copy; quantised ones go through the gguf package, which is imported when the first of them is met.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mpiinfer.errors import CheckpointError
from mpiinfer.weights.slices import Read

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


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
    head = read.entry.paired_head_dim
    if head:
        # Stored row 2i + s of a head belongs at i + s * head / 2.
        values = values.reshape(-1, head // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    return values


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
