"""The scheduler under random traces: each sequence is computed once, in order, within its budgets; none starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mpiinfer.engine.scheduler import Scheduler
from mpiinfer.engine.step import VERSION, NewSequence, Sample, StepPlan, StepResult


def _sequence(number: int, prompt: int, new_tokens: int) -> NewSequence:
    return NewSequence(number, list(range(prompt)), prompt + new_tokens - 1, 0.0, 0, 1.0, 0, -1)


class Replay:
    """What ranks see: follows the plans and checks that they make sense."""

    def __init__(self, max_step_tokens: int, cache_tokens: int) -> None:
        self.max_step_tokens = max_step_tokens
        self.cache_tokens = cache_tokens
        self.running: dict[int, NewSequence] = {}
        self.cached: dict[int, int] = {}
        self.fed: dict[int, list[int]] = {}
        self.slot_of: dict[int, int] = {}
        self.admitted: list[int] = []
        self.number = 0

    def follow(self, plan: StepPlan) -> StepResult:
        assert plan.number == self.number
        self.number += 1
        for sequence in plan.freed:
            del self.running[sequence]
        for new in plan.new:
            assert new.sequence not in self.cached
            self.running[new.sequence] = new
            self.cached[new.sequence] = 0
            self.fed[new.sequence] = []
            self.slot_of[new.sequence] = plan.slot
            self.admitted.append(new.sequence)
        assert sum(new.capacity for new in self.running.values()) <= self.cache_tokens
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks if chunk.token < 0)
        assert prompt_tokens <= self.max_step_tokens
        samples = []
        for chunk in plan.chunks:
            assert self.slot_of[chunk.sequence] == plan.slot
            assert chunk.start == self.cached[chunk.sequence]
            new = self.running[chunk.sequence]
            self.cached[chunk.sequence] += chunk.num_tokens
            assert self.cached[chunk.sequence] <= new.capacity
            if chunk.start >= len(new.prompt):
                assert chunk.token == self.fed[chunk.sequence][-1], "a decode step feeds the token that was sampled"
            assert chunk.samples == (self.cached[chunk.sequence] >= len(new.prompt))
            if chunk.samples:
                token = 1000 + 7 * chunk.sequence + len(self.fed[chunk.sequence])
                self.fed[chunk.sequence].append(token)
                samples.append(Sample(chunk.sequence, token, 0.0, [], []))
        return StepResult(VERSION, plan.number, samples)


requests = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=30)


@settings(max_examples=200)
@given(
    requests=requests,
    num_slots=st.integers(1, 5),
    max_step_tokens=st.integers(1, 64),
    room=st.integers(0, 200),
    max_sequences=st.none() | st.integers(1, 8),
)
def test_random_traces(
    requests: list[tuple[int, int]], num_slots: int, max_step_tokens: int, room: int, max_sequences: int | None
) -> None:
    sequences = [_sequence(i, prompt, new) for i, (prompt, new) in enumerate(requests)]
    cache_tokens = max(new.capacity for new in sequences) + room
    scheduler = Scheduler(
        num_slots=num_slots,
        cache_tokens=cache_tokens,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
    )
    replay = Replay(max_step_tokens, cache_tokens)
    for new in sequences:
        scheduler.add(new)
    in_flight: dict[int, StepResult] = {}
    num_rounds = 0
    while not scheduler.is_done or in_flight:
        for slot in range(num_slots):
            if slot in in_flight:
                result = in_flight.pop(slot)
                scheduler.collect(slot, result)
                for sample in result.samples:
                    if len(replay.fed[sample.sequence]) == requests[sample.sequence][1]:
                        scheduler.finish(sample.sequence)
            plan = scheduler.plan(slot)
            if plan is not None:
                in_flight[slot] = replay.follow(plan)
                assert max_sequences is None or len(replay.running) <= max_sequences
        num_rounds += 1
        assert num_rounds < 20_000, "no progress"
    assert scheduler.drain().is_final
    assert {number: len(tokens) for number, tokens in replay.fed.items()} == {
        number: new for number, (_, new) in enumerate(requests)
    }
    assert replay.admitted == sorted(replay.admitted), "first come, first served"
    assert scheduler.num_reserved == 0


def test_sequences_spread_over_the_slots() -> None:
    scheduler = Scheduler(num_slots=3, cache_tokens=10_000, max_step_tokens=1000)
    for number in range(8):
        scheduler.add(_sequence(number, 5, 5))
    plans = [scheduler.plan(slot) for slot in range(3)]
    assert [len(plan.new) for plan in plans if plan] == [3, 3, 2]


def test_a_long_prompt_is_cut_and_does_not_stop_others() -> None:
    scheduler = Scheduler(num_slots=1, cache_tokens=10_000, max_step_tokens=100)
    replay = Replay(100, 10_000)
    scheduler.add(_sequence(0, 5, 50))
    first = scheduler.plan(0)
    assert first is not None
    scheduler.collect(0, replay.follow(first))
    scheduler.add(_sequence(1, 250, 5))
    tokens = []
    for _ in range(3):
        plan = scheduler.plan(0)
        assert plan is not None
        tokens.append([chunk.num_tokens for chunk in plan.chunks])
        scheduler.collect(0, replay.follow(plan))
    assert tokens == [[1, 100], [1, 100], [1, 50]]
