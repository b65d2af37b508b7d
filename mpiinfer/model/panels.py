"""`PanelWeight`: a matrix on a CPU as fp32, fp16 or bf16, in the order in which the kernel reads it.

Panels of 32 rows lie one after another, [ceil(rows / 32)][columns][32]: the kernel streams them once for a few rows of
activations and reuses each from the cache for many. Promises: a row of the result depends on its own activations only,
bit for bit, however many others there are; sums are taken in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional

from mpiinfer.model.formats import LinearWeight
from mpiinfer.model.kernels import library

PANEL = 32

DenseName = Literal["fp32", "fp16", "bf16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class PanelWeight(LinearWeight):
    """Activations are float32 whatever the weight's own format."""

    def __init__(self, shape: tuple[int, ...], name: DenseName) -> None:
        """shape: [rows, columns]. name: the format."""
        self.shape = shape
        self.format = name
        num_panels = -(-shape[0] // PANEL)
        # Zeros, since the last panel may have fewer rows.
        self._panels = torch.zeros((num_panels, shape[1], PANEL), dtype=DTYPES[name])
        loaded = library()
        self._kernel: Callable[..., None] | None = None if loaded is None else getattr(loaded, f"linear_{name}")

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes

    def fill(self, row: int, values: torch.Tensor) -> None:
        for panel, first, rows in panel_parts(row, values):
            self._panels[panel, :, first : first + rows.shape[0]] = rows.t()

    def tensor(self) -> torch.Tensor:
        return self._panels.transpose(1, 2).reshape(-1, self.shape[1])[: self.shape[0]].float()

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._kernel is None:
            return functional.linear(x_TI, self.tensor())
        num_tokens, (num_rows, num_columns) = x_TI.shape[0], self.shape
        x_TI = x_TI.contiguous()
        y_TO = torch.empty((num_tokens, num_rows))
        self._kernel(
            x_TI.data_ptr(),
            self._panels.data_ptr(),
            y_TO.data_ptr(),
            num_tokens,
            num_columns,
            num_rows,
            torch.get_num_threads(),
        )
        return y_TO

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._panels[ids // PANEL, :, ids % PANEL].float()


def panel_parts(row: int, values: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
    """The rows from `row` on, cut at panels: (panel, first row in it, values)."""
    parts = []
    at = 0
    while at < values.shape[0]:
        panel, first = divmod(row + at, PANEL)
        count = min(PANEL - first, values.shape[0] - at)
        parts.append((panel, first, values[at : at + count]))
        at += count
    return parts
