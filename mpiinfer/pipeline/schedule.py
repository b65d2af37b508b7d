"""`Schedule`: the order in which each stage of a pipeline works on its slots, as a value that can be checked and shown.

A schedule is one round, repeated: for each stage a tuple of actions. The checker proves that sends meet receives in
order and that no stage waits for ever, under sends that complete only when they are received; the grid shows who is
busy when. Nothing here moves data: one executor interprets every schedule.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Literal, NamedTuple


class Kind(Enum):
    """What a stage does for a slot; the value is its letter in a printed schedule.

    COLLECT (head): wait for the slot's last result, if one is due. PLAN: the head makes and announces the slot's next
    step, the others hear it. RECEIVE: the activation of the stage before. FORWARD: run the layers. SEND: start
    sending the activation to the next stage, from the slot's own buffer. RETURN (last stage): start sending the
    result to the head.
    """

    COLLECT = "C"
    PLAN = "P"
    RECEIVE = "R"
    FORWARD = "F"
    SEND = "S"
    RETURN = "T"


class Action(NamedTuple):
    """One entry of a stage's round, e.g. F0: forward of slot 0."""

    kind: Kind
    slot: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.slot}"


@dataclass(frozen=True)
class Schedule:
    """`rounds[stage]` is what that stage does in one round, over `num_slots` micro-batches in flight."""

    num_slots: int
    rounds: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.rounds)


class ScheduleError(AssertionError):
    """A schedule that cannot run: our own mistake, never a user's."""


def ring(num_stages: int, num_slots: int) -> Schedule:
    """Every stage takes the slots in turn; with `num_slots` >= `num_stages` no stage ever waits for a result."""
    rounds = []
    for stage in range(num_stages):
        is_first, is_last = stage == 0, stage == num_stages - 1
        kinds = [
            *([Kind.COLLECT] if is_first else []),
            Kind.PLAN,
            *([] if is_first else [Kind.RECEIVE]),
            Kind.FORWARD,
            Kind.RETURN if is_last else Kind.SEND,
        ]
        rounds.append(tuple(Action(kind, slot) for slot in range(num_slots) for kind in kinds))
    return Schedule(num_slots, tuple(rounds))


Sends = Literal["posted", "synchronous"]


def check(schedule: Schedule, num_rounds: int = 4, sends: Sends = "posted") -> None:
    """Prove that the schedule runs `num_rounds` rounds to their end.

    "posted": a send starts and the stage goes on; its slot's buffer is free again once the send was received. This is
    what the executor does. "synchronous": a send stops the stage until it is received; shows what would deadlock.

    Raises ScheduleError naming the action that each stuck stage waits in, or the two that should have met.
    """
    _Simulation(schedule, num_rounds, sends).run()


def grid(schedule: Schedule, num_rounds: int = 3) -> str:
    """The schedule as text: a row a stage, a column a unit of time, F0 the forward of slot 0, .. an idle unit."""
    busy = _timeline(schedule, num_rounds)
    length = max(time for row in busy for time in row) + 1
    lines = []
    for stage, row in enumerate(busy):
        cells = [f"F{row[time]}" if time in row else ".." for time in range(length)]
        lines.append(f"stage {stage}  " + " ".join(cells))
    return "\n".join(lines)


def bubble_fraction(schedule: Schedule, num_rounds: int) -> float:
    """Idle share of all stages' time over `num_rounds` rounds, where each forward takes one unit of time."""
    busy = _timeline(schedule, num_rounds)
    length = max(time for row in busy for time in row) + 1
    return 1 - sum(len(row) for row in busy) / (length * schedule.num_stages)


def _timeline(schedule: Schedule, num_rounds: int) -> list[dict[int, int]]:
    """For each stage: unit of time -> slot whose forward runs then. Each forward takes one unit, the rest none."""
    done: dict[tuple[int, int, int], int] = {}  # (round, stage, slot) -> time at which its forward ends
    free = [0] * schedule.num_stages
    busy: list[dict[int, int]] = [{} for _ in range(schedule.num_stages)]
    last = schedule.num_stages - 1
    for number in range(num_rounds):
        for stage, actions in enumerate(schedule.rounds):
            for action in actions:
                if action.kind is not Kind.FORWARD:
                    continue
                slot = action.slot
                before = done[number, stage - 1, slot] if stage else done.get((number - 1, last, slot), 0)
                start = max(free[stage], before)
                busy[stage][start] = slot
                free[stage] = done[number, stage, slot] = start + 1
    return busy


class _Simulation:
    """Runs the stages' programs against each other, one action at a time, until all end or none can move."""

    def __init__(self, schedule: Schedule, num_rounds: int, sends: Sends) -> None:
        self.schedule = schedule
        self.sends = sends
        self.programs: list[Iterator[Action]] = [_repeat(actions, num_rounds) for actions in schedule.rounds]
        drain = (Action(Kind.COLLECT, slot) for slot in range(schedule.num_slots))
        self.programs[0] = chain(self.programs[0], drain)
        self.current = [next(program, None) for program in self.programs]
        self.channels: dict[str, deque[int]] = defaultdict(deque)  # channel -> slots sent and not yet received
        self.blocked: dict[int, str] = {}  # stage in a synchronous send -> its channel
        self.in_flight: set[int] = set()  # slots whose result is due
        self.planned = [0] * schedule.num_stages
        self.plans: list[int] = []

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for stage in range(self.schedule.num_stages):
                while self.current[stage] is not None and self._try(stage):
                    self.current[stage] = next(self.programs[stage], None)
                    moved = True
        stuck = {stage: str(action) for stage, action in enumerate(self.current) if action is not None}
        if stuck:
            waits = ", ".join(f"stage {stage} in {action}" for stage, action in stuck.items())
            raise ScheduleError(f"the schedule cannot go on: {waits}\n{grid(self.schedule)}")
        if any(self.channels.values()):
            raise ScheduleError(f"sends without a receive: {dict(self.channels)}")

    def _try(self, stage: int) -> bool:
        """Do the stage's current action if it can be done now."""
        action = self.current[stage]
        assert action is not None
        kind, slot = action
        if kind is Kind.PLAN:
            return self._plan(stage, slot)
        if kind is Kind.RECEIVE:
            return self._receive(f"stage {stage - 1}", action)
        if kind is Kind.COLLECT:
            if slot not in self.in_flight:
                return True
            if not self._receive("result", action):
                return False
            self.in_flight.remove(slot)
            return True
        if kind is Kind.SEND:
            return self._send(stage, f"stage {stage}", slot)
        if kind is Kind.RETURN:
            return self._send(stage, "result", slot)
        return True

    def _plan(self, stage: int, slot: int) -> bool:
        """The head announces without waiting; the others hear the plans in the order of announcement."""
        if stage == 0:
            self.plans.append(slot)
            self.in_flight.add(slot)
            return True
        if self.planned[stage] == len(self.plans):
            return False
        if self.plans[self.planned[stage]] != slot:
            raise ScheduleError(
                f"stage {stage} plans slot {slot}, the head announced {self.plans[self.planned[stage]]}"
            )
        self.planned[stage] += 1
        return True

    def _receive(self, channel: str, action: Action) -> bool:
        waiting = self.channels[channel]
        if not waiting:
            return False
        if waiting[0] != action.slot:
            raise ScheduleError(f"{action} meets the send of slot {waiting[0]} on {channel}")
        waiting.popleft()
        return True

    def _send(self, stage: int, channel: str, slot: int) -> bool:
        if self.sends == "synchronous":
            if self.blocked.get(stage) == channel:
                if slot in self.channels[channel]:
                    return False
                del self.blocked[stage]
                return True
            self.channels[channel].append(slot)
            self.blocked[stage] = channel
            return False
        if slot in self.channels[channel]:
            return False  # the buffer of this slot is still being sent
        self.channels[channel].append(slot)
        return True


def _repeat(actions: tuple[Action, ...], num_rounds: int) -> Iterator[Action]:
    for _ in range(num_rounds):
        yield from actions
