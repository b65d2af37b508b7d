"""`Batch`: what a step computes, flat over its sequences, and where their keys and values lie.

Made once when a plan is heard, so that the layers find tensors and no lists.

Shapes: T tokens of the step, S rows to sample, n sequences, N blocks of all their tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one sequence in a step: rows `first` to `first + num_tokens`, at positions from `start` on.

    blocks: of the cache, those of all its positions so far; there may be more.
    """

    blocks: Sequence[int]
    first: int
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        """Its positions with these."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids, positions, slots: int64 [T], a slot being block * block_tokens + offset of a token in the cache.

    sample_rows: int64 [S], the rows whose logits are wanted. For the kernels, on the CPU: segments: int32 [n, 4] of
    (first row, start, tokens, place of its table); tables: int32 [N], the blocks of one sequence after another's.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sample_rows: torch.Tensor
    segments: torch.Tensor
    tables: torch.Tensor

    @staticmethod
    def of(
        token_ids: Sequence[int],
        segments: Sequence[Segment],
        sample_rows: Sequence[int],
        block_tokens: int,
        device: torch.device,
    ) -> Batch:
        """Tensors of a step whose segments cover all of `token_ids`."""
        positions: list[int] = []
        slots: list[int] = []
        rows: list[tuple[int, int, int, int]] = []
        tables: list[int] = []
        for segment in segments:
            blocks, places = segment.blocks, range(segment.start, segment.stop)
            positions += places
            slots += [blocks[place // block_tokens] * block_tokens + place % block_tokens for place in places]
            rows.append((segment.first, segment.start, segment.num_tokens, len(tables)))
            tables += blocks[: -(-segment.stop // block_tokens)]

        def on_device(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return Batch(
            on_device(token_ids),
            on_device(positions),
            on_device(slots),
            on_device(sample_rows),
            torch.tensor(rows, dtype=torch.int32).view(-1, 4),
            torch.tensor(tables, dtype=torch.int32),
        )
