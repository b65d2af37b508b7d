"""`Grid`: pure arithmetic between a world rank and its place (replica, stage, shard). No MPI, no torch.

Positions run shard first, then stage, then replica: position = (replica * pipeline + stage) * tensor + shard. A
`Grid` also says which world rank stands at which position, so that the shards of one stage share a node.

>>> grid = Grid(tensor=2, pipeline=2, replicas=1, ranks=(0, 2, 1, 3))
>>> grid.place(1)
Place(replica=0, stage=1, shard=0)
>>> grid.shards_of(replica=0, stage=0)
(0, 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpiinfer.errors import LayoutError
from mpiinfer.layout.spec import Layout


class Place(NamedTuple):
    """Where a rank stands."""

    replica: int
    stage: int
    shard: int


@dataclass(frozen=True)
class Grid:
    """`ranks[position]` is the world rank at that position; the first one is the head of the model."""

    tensor: int
    pipeline: int
    replicas: int
    ranks: tuple[int, ...]

    def place(self, rank: int) -> Place:
        """The place of a world rank."""
        rest, shard = divmod(self.ranks.index(rank), self.tensor)
        replica, stage = divmod(rest, self.pipeline)
        return Place(replica, stage, shard)

    def rank_at(self, place: Place) -> int:
        """The world rank at a place."""
        return self.ranks[(place.replica * self.pipeline + place.stage) * self.tensor + place.shard]

    def shards_of(self, replica: int, stage: int) -> tuple[int, ...]:
        """World ranks of one tensor domain, in shard order."""
        return tuple(self.rank_at(Place(replica, stage, shard)) for shard in range(self.tensor))

    def stages_of(self, replica: int, shard: int) -> tuple[int, ...]:
        """World ranks of one pipeline domain, in stage order."""
        return tuple(self.rank_at(Place(replica, stage, shard)) for stage in range(self.pipeline))

    def members_of(self, replica: int) -> tuple[int, ...]:
        """World ranks of one replica, by position: its head comes first."""
        size = self.tensor * self.pipeline
        return self.ranks[replica * size : (replica + 1) * size]


def make_grid(layout: Layout, nodes: Sequence[int]) -> Grid:
    """Place a layout on a world whose rank r runs on node `nodes[r]`.

    Raises LayoutError when the world has another number of ranks than the layout.
    """
    if layout.num_ranks != len(nodes):
        raise LayoutError(
            f"layout: tensor {layout.tensor} x pipeline {layout.pipeline} x replicas {layout.replicas} = "
            f"{layout.num_ranks} ranks, but the world has {len(nodes)}: start {layout.num_ranks} processes, or change "
            "[parallel] (--tp, --pp, --dp)"
        )
    ranks = tuple(range(len(nodes)))
    if layout.order == "tensor-inner":
        ranks = _shards_together(layout.tensor, nodes)
    return Grid(layout.tensor, layout.pipeline, layout.replicas, ranks)


def _shards_together(tensor: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Cut tensor groups out of each node's ranks, node by node; what is left over on the nodes forms the last groups.

    Rank 0 leads the first group, because results are wanted there.
    """
    groups: list[tuple[int, ...]] = []
    left_over: list[int] = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, where in enumerate(nodes) if where == node]
        whole = len(ranks) // tensor * tensor
        groups += [tuple(ranks[start : start + tensor]) for start in range(0, whole, tensor)]
        left_over += ranks[whole:]
    groups += [tuple(left_over[start : start + tensor]) for start in range(0, len(left_over), tensor)]
    first = next(group for group in groups if 0 in group)
    groups.remove(first)
    lead = (0, *(rank for rank in first if rank != 0))
    return tuple(rank for group in (lead, *groups) for rank in group)
