"""`QuantisedWeight`: a matrix on a CPU in blocks of 32 columns, w = d q + m with q of 4 or 8 bits.

Blocks of a file are taken as they are, without a second rounding; other values are rounded to the nearest. Activations
are rounded to 8 bits for each token and block by themselves. So a token's result depends on its own activations only,
bit for bit. Promises: `tensor` gives the exact values that are multiplied.

Shapes: n rows, B blocks of 32 columns, J = 8 groups of 4 columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from mpiinfer.model.formats import LinearWeight
from mpiinfer.model.kernels import library
from mpiinfer.model.panels import PANEL, panel_parts

BLOCK = 32
GROUPS = BLOCK // 4
# Passed to the kernels where the minimum of each block is stored.
STORED = -1
Bits = Literal[4, 8]


@dataclass(frozen=True)
class Blocks:
    """Some rows of a matrix in blocks: w = d q + m.

    q: uint8 [n, B, 32]. d, m: float16 [n, B]; where m is None it is -offset d.
    """

    q: torch.Tensor
    d: torch.Tensor
    m: torch.Tensor | None
    offset: int = 0

    @property
    def minimum(self) -> torch.Tensor:
        return -self.offset * self.d if self.m is None else self.m

    @staticmethod
    def rounded(values: torch.Tensor, bits: Bits) -> Blocks:
        """float32 [n, B * 32] to the nearest: 8 bits evenly around 0, 4 bits from the smallest to the largest."""
        parts = values.view(values.shape[0], -1, BLOCK)
        if bits == 8:
            d = (parts.abs().amax(dim=2) / 127).half()
            q = _quotient(parts, d).clamp_(-127, 127) + 128
            return Blocks(q.to(torch.uint8), d, None, 128)
        m = parts.amin(dim=2).half()
        d = ((parts.amax(dim=2) - m) / 15).half()
        q = _quotient(parts - m.float().unsqueeze(2), d).clamp_(0, 15)
        return Blocks(q.to(torch.uint8), d, m)


def _quotient(parts: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    wide = d.float().unsqueeze(2)
    return torch.where(wide > 0, parts / wide, 0.0).round_()


class QuantisedWeight(LinearWeight):
    """Activations are float32."""

    def __init__(self, shape: tuple[int, ...], bits: Bits, *, has_minimum: bool, lead: int = 0) -> None:
        """shape: [rows, columns]. has_minimum: m is stored, else it is -8 d or -128 d.

        lead: columns of the first block that lie before the shard's first one, so that its blocks stay the file's.
        """
        self.shape = shape
        self.format = f"int{bits}"
        self.bits: Bits = bits
        self.lead = lead
        self._offset = STORED if has_minimum else 1 << (bits - 1)
        self._quant_bytes = BLOCK * PANEL * bits // 8
        num_panels, self._num_blocks = -(-shape[0] // PANEL), -(-(lead + shape[1]) // BLOCK)
        record_bytes = self._quant_bytes + 2 * PANEL * (1 + has_minimum)
        # Zeros, since the last panel may have fewer rows.
        self._records = torch.zeros((num_panels, self._num_blocks, record_bytes), dtype=torch.uint8)
        loaded = library()
        self._kernel: Callable[..., None] | None = None if loaded is None else getattr(loaded, f"linear_{self.format}")

    @property
    def num_bytes(self) -> int:
        return self._records.nbytes

    def fill(self, row: int, values: torch.Tensor) -> None:
        """Rounds `values` to the nearest that the format holds."""
        padded = values.new_zeros((values.shape[0], self._num_blocks * BLOCK), dtype=torch.float32)
        padded[:, self.lead : self.lead + self.shape[1]] = values
        self.fill_blocks(row, Blocks.rounded(padded, self.bits))

    def fill_blocks(self, row: int, blocks: Blocks) -> None:
        """Store all blocks of the rows from `row` on, exactly as they are.

        Blocks with a minimum of their own need a weight that stores it, and more than 4 bits one of 8.
        """
        q = blocks.q
        if self._offset != STORED:
            assert blocks.m is None, "this weight stores no minimum"
            q = q + (self._offset - blocks.offset)
        quants, d, m = self._quants, self._halves(0), self._halves(1) if self._offset == STORED else None
        for panel, first, part in panel_parts(row, q):
            at = panel * PANEL + first - row
            here, taken = slice(first, first + part.shape[0]), slice(at, at + part.shape[0])
            quants[panel, :, :, here] = self._packed(part)
            d[panel, :, here] = blocks.d[taken].t()
            if m is not None:
                m[panel, :, here] = blocks.minimum[taken].t()

    def tensor(self) -> torch.Tensor:
        return self.rows(torch.arange(self.shape[0]))

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._kernel is None:
            return self._multiply(x_TI)
        num_tokens, (num_rows, num_columns) = x_TI.shape[0], self.shape
        x_TI = x_TI.contiguous()
        y_TO = torch.empty((num_tokens, num_rows))
        self._kernel(
            x_TI.data_ptr(),
            self._records.data_ptr(),
            y_TO.data_ptr(),
            num_tokens,
            num_columns,
            self.lead,
            num_rows,
            self._offset,
            torch.get_num_threads(),
        )
        return y_TO

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        panel, lane = ids // PANEL, ids % PANEL
        groups = self._quants[panel, :, :, lane]  # [T, B, groups, 4]
        if self.bits == 4:
            groups = torch.cat((groups & 15, groups >> 4), dim=2)
        q = groups.flatten(2).float()
        d = self._halves(0)[panel, :, lane].float().unsqueeze(2)
        if self._offset == STORED:
            values = q * d + self._halves(1)[panel, :, lane].float().unsqueeze(2)
        else:
            values = (q - self._offset) * d
        return values.flatten(1)[:, self.lead : self.lead + self.shape[1]].contiguous()

    # ---- inside

    @property
    def _quants(self) -> torch.Tensor:
        """The bytes of q, uint8 [panels, B, groups, 32 rows, 4]."""
        shape = (*self._records.shape[:2], self._quant_bytes // (4 * PANEL), PANEL, 4)
        return self._records[:, :, : self._quant_bytes].view(shape)

    def _halves(self, index: int) -> torch.Tensor:
        """d (0) or m (1) of all blocks, float16 [panels, B, 32]."""
        start = self._quant_bytes + 2 * PANEL * index
        return self._records[:, :, start : start + 2 * PANEL].view(torch.float16)

    def _packed(self, q: torch.Tensor) -> torch.Tensor:
        """uint8 [n, B, 32] as the kernel reads it, [B, groups, n, 4]."""
        groups = q.view(q.shape[0], -1, GROUPS, 4).permute(1, 2, 0, 3)
        if self.bits == 8:
            return groups
        return groups[:, : GROUPS // 2] | (groups[:, GROUPS // 2 :] << 4)

    def _multiply(self, x_TI: torch.Tensor) -> torch.Tensor:
        """What the kernel computes: activations rounded to 8 bits a block, then the exact product of both."""
        padded = x_TI.new_zeros((x_TI.shape[0], self._num_blocks * BLOCK))
        padded[:, self.lead : self.lead + self.shape[1]] = x_TI
        parts_TB32 = padded.view(x_TI.shape[0], -1, BLOCK)
        largest_TB1 = parts_TB32.abs().amax(dim=2, keepdim=True)
        inverse_TB1 = torch.where(largest_TB1 > 0, 127 / largest_TB1, 0.0)
        rounded = (parts_TB32 * inverse_TB1).round() * (largest_TB1 / 127)
        return rounded.view_as(padded)[:, self.lead : self.lead + self.shape[1]] @ self.tensor().t()
