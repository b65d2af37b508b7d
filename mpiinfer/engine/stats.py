"""What a run cost, by rank and by request: where a rank's time went, and when each request's tokens came.

Taken from clocks that run anyway; the fractions are for comparing layouts and for finding what to make faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankTimes:
    """One rank's seconds in a run.

    wall_s: the whole run. forward_s: in the stage, its tensor domain's collectives included. tensor_s: in those
    collectives. wait_s: outside the stage, waiting for plans, activations and results.
    """

    wall_s: float
    forward_s: float
    tensor_s: float
    wait_s: float


@dataclass(frozen=True)
class RequestTimes:
    """One request: seconds from its admission to its first and to its last token."""

    num_tokens: int
    first_token_s: float
    last_token_s: float

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds from one token to the next, or None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass(frozen=True)
class RunStats:
    """A whole run: times of all ranks in the order of the model's domain, and of all requests."""

    ranks: tuple[RankTimes, ...]
    requests: tuple[RequestTimes, ...]

    @property
    def wall_s(self) -> float:
        return max(rank.wall_s for rank in self.ranks)

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time in which they wait for another stage or for the head."""
        return _share([rank.wait_s for rank in self.ranks], self.ranks)

    @property
    def comm_fraction(self) -> float:
        """Share of the ranks' time in the collectives of their tensor domains."""
        return _share([rank.tensor_s for rank in self.ranks], self.ranks)

    @property
    def step_overhead_fraction(self) -> float:
        """Share of the head's time neither in the model nor waiting for it: planning, sampling's ends, text."""
        head = self.ranks[0]
        return max(0.0, head.wall_s - head.forward_s - head.wait_s) / head.wall_s if head.wall_s else 0.0


def _share(seconds: Sequence[float], ranks: Sequence[RankTimes]) -> float:
    wall_s = sum(rank.wall_s for rank in ranks)
    return sum(seconds) / wall_s if wall_s else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of `values` do not exceed; of none, 0."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
