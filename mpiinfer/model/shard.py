"""`ShardSpec`: how one parameter divides over the shards of a tensor domain, for any shape and any number of shards.

Pure arithmetic. Nothing needs to divide: query heads go out as evenly as they can, a shard holds each key/value head
that its query heads read (one on a boundary is held twice), everything else is cut into nearly equal ranges.

>>> [heads.queries for heads in (HeadShard.of(9, 3, shard, 2) for shard in range(2))]
[range(0, 5), range(5, 9)]
>>> [heads.kv for heads in (HeadShard.of(9, 3, shard, 2) for shard in range(2))]
[range(0, 2), range(1, 3)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Columns of an MLP and rows of a vocabulary are cut at multiples of this where that costs no evenness to speak of:
# it is a block of the common quantisations and a whole number of vector registers.
UNIT = 32


def even_range(total: int, shard: int, num_shards: int, unit: int = 1) -> range:
    """The shard's part of `range(total)`: parts differ by at most one `unit`, the larger ones first."""
    num_units = total // unit
    each, larger = divmod(num_units, num_shards)
    start = shard * each + min(shard, larger)
    stop = start + each + (shard < larger)
    return range(start * unit, stop * unit if shard < num_shards - 1 else total)


def columns_range(total: int, shard: int, num_shards: int) -> range:
    """`even_range` in units of UNIT where they divide `total` and are plenty, else to the element."""
    unit = UNIT if total % UNIT == 0 and total // UNIT >= 2 * num_shards else 1
    return even_range(total, shard, num_shards, unit)


@dataclass(frozen=True)
class HeadShard:
    """The attention heads of one shard. `queries` and `kv` are ranges of the model's heads."""

    queries: range
    kv: range
    group_size: int

    @staticmethod
    def of(num_heads: int, num_kv_heads: int, shard: int, num_shards: int) -> HeadShard:
        group_size = num_heads // num_kv_heads
        queries = even_range(num_heads, shard, num_shards)
        kv = range(queries.start // group_size, (queries.stop - 1) // group_size + 1)
        return HeadShard(queries, kv, group_size)

    def cache_width(self, head_dim: int) -> int:
        """Elements of keys and values that one token takes in one layer."""
        return 2 * len(self.kv) * head_dim

    @property
    def kv_of_query(self) -> tuple[int, ...]:
        """For each local query head, the local index of the key/value head that it reads."""
        return tuple(head // self.group_size - self.kv.start for head in self.queries)


Cut = Literal["whole", "columns", "queries", "kv"]


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter divides: along dim `dim`, by `cut`.

    whole: every shard holds all of it. columns: nearly equal ranges (MLP width, vocabulary).
    queries, kv: by attention heads of `head_dim` elements each.
    """

    cut: Cut = "whole"
    dim: int = 0
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1

    def ranges(self, shape: tuple[int, ...], shard: int, num_shards: int) -> tuple[range, ...]:
        """For each dim of the full `shape`, the range of it that `shard` holds."""
        ranges = [range(extent) for extent in shape]
        if self.cut == "columns":
            ranges[self.dim] = columns_range(shape[self.dim], shard, num_shards)
        elif self.cut != "whole":
            heads = HeadShard.of(self.num_heads, self.num_kv_heads, shard, num_shards)
            part = heads.queries if self.cut == "queries" else heads.kv
            ranges[self.dim] = range(part.start * self.head_dim, part.stop * self.head_dim)
        return tuple(ranges)
