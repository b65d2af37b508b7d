"""How a stage holds its weights: one interface, `Weight`, filled in pieces by the loader and called by the layers.

Promises: allocated bytes are exactly those of the manifest in the chosen format; a weight is filled row range by row
range, so that loading needs no second copy of a tensor. Refuses to know where the values come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn import functional

from mpiinfer.errors import UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHECKPOINT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Weight(ABC):
    """One parameter's local values, of logical shape `shape` ([rows, columns] or [rows])."""

    shape: tuple[int, ...]

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that the weight occupies."""

    @abstractmethod
    def fill(self, row: int, values: torch.Tensor) -> None:
        """Store `values` ([n, columns] or [n], any float dtype, on the CPU) as the rows from `row` on."""

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The values as one tensor of the compute dtype, of shape `shape`."""


class LinearWeight(Weight):
    """A weight that multiplies: `x @ w.T`. Also the table of an embedding."""

    @abstractmethod
    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """x_TI [T, columns] times the transposed weight: [T, rows], contiguous, in x's dtype."""

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids` (int64 [T]): [T, columns]."""


class DenseWeight(LinearWeight):
    """A weight held as one tensor of the compute dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes

    def fill(self, row: int, values: torch.Tensor) -> None:
        self._values[row : row + values.shape[0]].copy_(values)

    def tensor(self) -> torch.Tensor:
        return self._values

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._values.is_cpu and x_TI.shape[0] > 1 and self._values.dtype == torch.float32:
            # With few rows MKL's kernel for W x^T runs up to twice as fast as the one for x W^T (and never slower).
            return torch.mm(self._values, x_TI.t()).t().contiguous()
        return functional.linear(x_TI, self._values)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._values[ids]


def compute_dtype(weights: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of activations and dense weights for `--weights`.

    "native" is the checkpoint's own dtype; "auto" is that on a GPU and fp32 on a CPU, where it is the fastest.
    Raises UsageError for an unknown name.
    """
    if weights == "auto":
        weights = "fp32" if device.type == "cpu" else "native"
    if weights == "native":
        weights = _CHECKPOINT_DTYPES.get(checkpoint_dtype, "fp32")
    if weights not in DTYPES:
        raise UsageError(f"--weights {weights}: unknown format; known are {', '.join(DTYPES)}, native, auto")
    return DTYPES[weights]


def name_of(dtype: torch.dtype) -> str:
    """The name of a dense format."""
    return next(name for name, known in DTYPES.items() if known == dtype)
