"""How a stage holds its weights: one interface, `Weight`, filled in pieces by the loader and called by the layers.

Promises: allocated bytes are exactly what `num_bytes` says; a weight is filled row range by row range, so that loading
needs no second copy of a tensor. Refuses to know where the values come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn import functional

NAME_OF = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Weight(ABC):
    """One parameter's local values, of logical shape `shape` ([rows, columns] or [rows])."""

    shape: tuple[int, ...]
    format: str  # fp32, fp16, bf16, int8 or int4

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
        """The rows `ids` (int64 [T]) in the compute dtype: [T, columns]."""


class DenseWeight(LinearWeight):
    """A weight held as one tensor of the compute dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.format = NAME_OF[dtype]
        self._values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes

    def fill(self, row: int, values: torch.Tensor) -> None:
        self._values[row : row + values.shape[0]].copy_(values)

    def tensor(self) -> torch.Tensor:
        return self._values

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return functional.linear(x_TI, self._values)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._values[ids]
