"""Errors that all ranks share: a user's mistake seen by one rank becomes the same error on every rank.

Start-up work runs through these, so that all ranks leave together with one line, whoever found the mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpiinfer.comm.domain import Domain
from mpiinfer.errors import AbortedError, DomainError, MpiinferError

T = TypeVar("T")


def on_first(domain: Domain, work: Callable[[], T]) -> T:
    """Run `work` on the first rank only and hand its result, or its user error, to all. Collective."""
    outcome: tuple[T | None, MpiinferError | None] = (None, None)
    if domain.is_first:
        outcome = _attempt(domain, work)
    value, error = domain.bcast_object(outcome, idle=True)
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def on_all(domain: Domain, work: Callable[[], T]) -> T:
    """Run `work` on every rank; if any raised a user error, all raise the lowest such rank's. Collective."""
    value, error = _attempt(domain, work)
    errors = domain.gather_object(error, idle=True)
    first = domain.bcast_object(next((e for e in errors if e is not None), None), idle=True)
    if first is not None:
        raise first
    return value


def same_on_all(domain: Domain, value: T, error: Callable[[list[T]], MpiinferError]) -> None:
    """Raise `error(values by rank)` on every rank unless all ranks hold an equal `value`. Collective."""

    def compare() -> None:
        if any(other != values[0] for other in values):
            raise error(values)

    values = domain.gather_object(value, idle=True)
    on_first(domain, compare)


def _attempt(domain: Domain, work: Callable[[], T]) -> tuple[T | None, MpiinferError | None]:
    """User errors are shared; a failed wait or a bug of ours is posted, so that nobody waits, and goes on up."""
    try:
        return work(), None
    except AbortedError:
        raise
    except BaseException as error:
        if isinstance(error, MpiinferError) and not isinstance(error, DomainError):
            return None, error
        domain.waits.abort.post(f"rank {domain.world_ranks[domain.rank]}: {type(error).__name__}: {error}")
        raise
