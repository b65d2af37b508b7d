"""`Waits`: how every wait of a world is made, and `Abort`: how its ranks hear that one of them has failed.

Promises: a wait is polled, never blocking; it ends at its deadline or when another rank fails; a rank spins for a while
at most, and sleeps longer when there may be nothing to do for long. Refuses to know what is waited for.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from mpiinfer.errors import AbortedError, DeadlineError

# By these a rank that hears of a failure knows its kind.
DEADLINE_WORDS = "past the deadline"

POLLS_BETWEEN_LOOKS = 64
LOOK_EVERY_S = 1e-3
DOZE_S = 50e-6
IDLE_AFTER_S = 2e-3
# Half a percent of a core goes into waking this often; a rank hears of work so much later at most.
IDLE_SLEEP_S = 4e-3


class Abort(ABC):
    """How a failing rank tells the other ranks of its world, and how they notice."""

    @abstractmethod
    def post(self, cause: str) -> None:
        """Tell every other rank; never blocks."""

    @abstractmethod
    def poll(self) -> str | None:
        """The cause another rank posted, or None."""


class NoAbort(Abort):
    """For a world of one rank: there is nobody to tell."""

    def post(self, cause: str) -> None:
        pass

    def poll(self) -> str | None:
        return None


def spin() -> None:
    """Pause of a rank that has a core to itself: none."""


def yield_core() -> None:
    """Pause of a rank that shares its core: a spinning rank starves the one it waits for."""
    os.sched_yield()


def doze() -> None:
    """Pause of a rank that has waited for long: others may want this core, its peer or the threads of gloo.

    Yielding is not enough for them. Linux 6.18 was seen to leave threads that wake up waiting for seconds beside ranks
    that do nothing but yield: with 4 ranks on 2 cores an all-gather of 4 MiB over gloo took 7 to 30 s, and so 0.6.
    """
    time.sleep(DOZE_S)


def rest() -> None:
    """Pause of a rank to which work may come late or never."""
    time.sleep(IDLE_SLEEP_S)


@dataclass(slots=True)
class Waits:
    """How all waits of one world are made: polled, with a deadline, an eye on aborts, and a pause between polls."""

    abort: Abort
    deadline_s: float = 120.0
    pause: Callable[[], None] = spin
    # Domains closed after a failure: what their peers may still write into stays allocated as long as the world does.
    quarantine: list[object] = field(default_factory=list)

    def until(
        self,
        test: Callable[[], bool],
        describe: Callable[[], str],
        *,
        idle: bool = False,
        rest: Callable[[], None] = rest,
    ) -> float:
        """Poll `test` until it is true; return the seconds waited.

        `idle` waits are for work that may come late or never: they have no deadline and `rest` between polls, which
        takes IDLE_SLEEP_S at most.

        Raises DeadlineError past the deadline, AbortedError when another rank posted a failure. A missed deadline is
        posted as well: the peers would wait for this rank in their turn.
        """
        start = time.perf_counter()
        next_look = start + LOOK_EVERY_S
        pause = self.pause
        polls = 0
        while not test():
            pause()
            polls += 1
            if polls % POLLS_BETWEEN_LOOKS and not idle:
                continue
            now = time.perf_counter()
            if now >= next_look:
                next_look = now + LOOK_EVERY_S
                self._look(now - start, describe, idle=idle)
                pause = rest if idle and now - start > IDLE_AFTER_S else doze
        return time.perf_counter() - start

    def _look(self, waited_s: float, describe: Callable[[], str], *, idle: bool) -> None:
        cause = self.abort.poll()
        if cause is not None:
            raise AbortedError(cause)
        if not idle and waited_s > self.deadline_s:
            late = DeadlineError(
                f"{describe()} waited {waited_s:.1f} s, {DEADLINE_WORDS} of {self.deadline_s:g} s: a peer is dead or "
                "stuck (raise [comm] deadline_s in the layout if the work is merely slow)"
            )
            self.abort.post(str(late))
            raise late
