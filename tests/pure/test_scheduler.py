"""The scheduler under random traces, seen from the ranks: whatever was shared, preempted or cancelled, each sequence
gets its own tokens, computed in order over its own keys and values; no block leaks and nobody starves."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiinfer.engine.blocks import BlockPool
from mpiinfer.engine.sampling import Sampling
from mpiinfer.engine.scheduler import MIN_CHUNK_TOKENS, Limits, Scheduler, Sequence
from mpiinfer.engine.step import VERSION, NewSequence, Sample, StepPlan, StepResult

GREEDY = Sampling()
NUM_TOKEN_IDS = 3  # few, so that sequences often begin alike


def next_token(token_ids: SequenceOf[int]) -> int:
    """Stands for the model: a function of all the tokens so far."""
    return hash(tuple(token_ids)) % NUM_TOKEN_IDS


def answer(prompt: list[int], num_new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Held:
    """What a rank knows of a sequence."""

    new: NewSequence
    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class Ranks:
    """Follows the plans as a rank does. A cell of the cache holds the tokens that its key and value depend on."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.held: dict[int, Held] = {}
        self.number = 0
        self.begun: list[int] = []

    def follow(self, plan: StepPlan) -> StepResult:
        assert plan.number == self.number
        self.number += 1
        for sequence in plan.freed:
            del self.held[sequence]
        for new in plan.new:
            assert new.sequence not in self.held
            self.held[new.sequence] = Held(new, list(new.token_ids), list(new.blocks))
            if new.sequence not in self.begun:
                self.begun.append(new.sequence)
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            held = self.held[chunk.sequence]
            held.blocks += chunk.blocks
            if chunk.token >= 0:
                assert chunk.num_tokens == 1 and chunk.start == len(held.token_ids)
                held.token_ids.append(chunk.token)
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                cell = (held.blocks[position // self.block_tokens], position % self.block_tokens)
                self.cells[cell] = tuple(held.token_ids[: position + 1])
        samples = []
        for chunk in plan.chunks:
            held = self.held[chunk.sequence]
            stop = chunk.start + chunk.num_tokens
            for position in range(stop):
                cell = (held.blocks[position // self.block_tokens], position % self.block_tokens)
                assert self.cells[cell] == tuple(held.token_ids[: position + 1]), "keys of other tokens were read"
            assert chunk.samples == (stop == len(held.token_ids))
            if chunk.samples:
                samples.append(_sample(chunk.sequence, next_token(held.token_ids)))
        return StepResult(VERSION, plan.number, samples)


def _sample(sequence: int, token: int) -> Sample:
    return Sample(sequence, token, 0.0, [], [])


@dataclass(frozen=True)
class Trace:
    """Requests: tokens of the prompt, new tokens, round of arrival, and after how many new tokens it is cancelled."""

    requests: list[tuple[list[int], int, int, int | None]]


prompts = st.lists(st.integers(0, NUM_TOKEN_IDS - 1), min_size=1, max_size=40)
requests = st.lists(
    st.tuples(prompts, st.integers(1, 12), st.integers(0, 20), st.none() | st.integers(0, 5)), min_size=1, max_size=25
)


@settings(max_examples=300, deadline=None)
@given(
    requests=requests,
    num_slots=st.integers(1, 4),
    step_tokens=st.integers(1, 64),
    block_tokens=st.integers(1, 8),
    room=st.integers(0, 40),
    max_sequences=st.integers(1, 8),
    shares=st.booleans(),
    attention_cost=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_random_traces(
    requests: list[tuple[list[int], int, int, int | None]],
    num_slots: int,
    step_tokens: int,
    block_tokens: int,
    room: int,
    max_sequences: int,
    shares: bool,
    attention_cost: float,
) -> None:
    largest = max(len(prompt) + num_new - 1 for prompt, num_new, *_ in requests)
    pool = BlockPool(-(-largest // block_tokens) + room, block_tokens)
    limits = Limits(step_tokens, max_sequences, attention_cost)
    scheduler = Scheduler(pool, num_slots=num_slots, limits=limits)
    ranks = Ranks(block_tokens)
    tokens: dict[int, list[int]] = {}
    in_flight: dict[int, StepResult] = {}
    num_rounds = num_added = 0
    order = sorted(range(len(requests)), key=lambda index: requests[index][2])
    finished: set[int] = set()

    def finish(number: int) -> None:
        scheduler.finish(number)
        finished.add(number)

    while num_added < len(requests) or not scheduler.is_done or in_flight:
        while num_added < len(requests) and requests[order[num_added]][2] <= num_rounds:
            prompt = requests[order[num_added]][0]
            scheduler.add(Sequence(num_added, list(prompt), GREEDY, shares))
            tokens[num_added] = []
            num_added += 1
        for slot in range(num_slots):
            if slot in in_flight:
                result = in_flight.pop(slot)
                scheduler.collect(slot, result)
                for sample in result.samples:
                    if sample.sequence not in finished:
                        tokens[sample.sequence].append(sample.token)
                        if len(tokens[sample.sequence]) == requests[order[sample.sequence]][1]:
                            finish(sample.sequence)
            for number in tokens.keys() - finished:
                cancel = requests[order[number]][3]
                if cancel is not None and len(tokens[number]) >= cancel and (num_rounds + slot) % 3 == 0:
                    finish(number)  # whatever it is doing: waiting, running, in a step
            plan = scheduler.plan(slot)
            if plan is not None:
                assert scheduler.num_running <= max_sequences
                parts = [chunk.num_tokens for chunk in plan.chunks]
                singles = sum(1 for chunk in plan.chunks if chunk.num_tokens == 1)
                assert sum(parts) <= step_tokens + singles + MIN_CHUNK_TOKENS
                in_flight[slot] = ranks.follow(plan)
            pool.check()
        num_rounds += 1
        assert num_rounds < 20_000, "no progress"
    assert ranks.follow(scheduler.command("drain")).samples == []
    assert not ranks.held and pool.num_used == 0
    for number, made in tokens.items():
        prompt, num_new, _, cancel = requests[order[number]]
        whole = answer(prompt, num_new)
        assert made == whole[: len(made)]
        assert cancel is not None or made == whole
    assert ranks.begun == sorted(ranks.begun), "first come, first served"


def _scheduler(num_blocks: int = 1000, *, num_slots: int = 1, step_tokens: int = 1000, **limits: float) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, 4), num_slots=num_slots, limits=Limits(step_tokens, 64, **limits))


def _prompt(number: int, length: int) -> list[int]:
    return [100 * number + 7 * at for at in range(length)]


def _run(scheduler: Scheduler, ranks: Ranks, slot: int = 0) -> StepPlan:
    plan = scheduler.plan(slot)
    assert plan is not None
    scheduler.collect(slot, ranks.follow(plan))
    return plan


def test_sequences_spread_over_the_slots() -> None:
    scheduler = _scheduler(num_slots=3)
    for number in range(8):
        scheduler.add(Sequence(number, _prompt(number, 5), GREEDY))
    plans = [scheduler.plan(slot) for slot in range(3)]
    assert [len(plan.new) for plan in plans if plan] == [3, 3, 2]


def test_slots_are_even_again_after_one_has_lost_its_sequences() -> None:
    scheduler, ranks = _scheduler(num_slots=2), Ranks(4)
    for number in range(8):
        scheduler.add(Sequence(number, _prompt(number, 5), GREEDY))
    under_way = {slot: ranks.follow(_planned(scheduler, slot)) for slot in (0, 1)}
    for sample in under_way[0].samples:
        scheduler.finish(sample.sequence)
    scheduler.collect(0, under_way[0])
    assert scheduler.plan(0) is None  # the others are all under way
    scheduler.collect(1, under_way[1])
    assert [len(_planned(scheduler, slot).chunks) for slot in (1, 0)] == [2, 2]


def _planned(scheduler: Scheduler, slot: int) -> StepPlan:
    plan = scheduler.plan(slot)
    assert plan is not None
    return plan


def test_a_long_prompt_is_cut_and_does_not_stop_others() -> None:
    scheduler, ranks = _scheduler(step_tokens=101), Ranks(4)
    scheduler.add(Sequence(0, _prompt(0, 5), GREEDY))
    _run(scheduler, ranks)
    scheduler.add(Sequence(1, _prompt(1, 250), GREEDY))
    tokens = [[chunk.num_tokens for chunk in _run(scheduler, ranks).chunks] for _ in range(3)]
    assert tokens == [[1, 100], [1, 100], [1, 50]]


def test_parts_of_one_prompt_are_under_way_in_several_slots() -> None:
    """Else all stages but one would idle through a long prompt."""
    scheduler = _scheduler(num_slots=2)
    scheduler.add(Sequence(0, _prompt(0, 400), GREEDY))
    plans = [scheduler.plan(slot) for slot in (0, 1)]
    assert [(plan.chunks[0].start, plan.chunks[0].num_tokens) for plan in plans if plan] == [(0, 100), (100, 100)]


def test_parts_get_shorter_where_the_context_is_long() -> None:
    scheduler, ranks = _scheduler(step_tokens=100, attention_cost=0.01), Ranks(4)
    scheduler.add(Sequence(0, _prompt(0, 400), GREEDY))
    parts = []
    while not parts or sum(parts) < 400:
        parts.append(_run(scheduler, ranks).chunks[0].num_tokens)
    assert parts[0] > 70 and parts[:-1] == sorted(parts[:-1], reverse=True) and parts[-2] < 30
    costs = [n * (1 + 0.01 * sum(parts[:i])) + 0.005 * n * n for i, n in enumerate(parts[:-1])]
    assert min(costs) > 90 and max(costs) <= 100


def test_a_known_prefix_is_not_computed_again() -> None:
    scheduler, ranks = _scheduler(), Ranks(4)
    prompt = _prompt(0, 18)
    scheduler.add(Sequence(0, prompt[:], GREEDY))
    scheduler.add(Sequence(1, prompt[:], GREEDY))  # in the same step: written before it is read
    scheduler.add(Sequence(2, prompt[:], GREEDY, shares=False))
    chunks = _run(scheduler, ranks).chunks
    assert [(chunk.start, chunk.num_tokens) for chunk in chunks] == [(0, 18), (16, 2), (0, 18)]
    for number in range(3):
        scheduler.finish(number)
    scheduler.add(Sequence(3, prompt[:16], GREEDY))
    assert _run(scheduler, ranks).chunks[0].start == 12, "its last token is computed, whatever is known"
    assert scheduler.counts.shared_tokens == 28


def test_the_youngest_gives_its_blocks_up_and_is_served_again_in_order() -> None:
    scheduler, ranks = _scheduler(num_blocks=6), Ranks(4)
    for number in range(2):
        scheduler.add(Sequence(number, _prompt(number, 8), GREEDY))
    begun = []
    for _ in range(20):
        plan = _run(scheduler, ranks)
        begun += [new.sequence for new in plan.new]
        if len(ranks.held[0].token_ids) == 15:
            break
    assert begun == [0, 1] and scheduler.counts.preemptions == 1 and scheduler.num_waiting == 1
    scheduler.finish(0)
    plan = _run(scheduler, ranks)
    assert [(new.sequence, new.num_prompt, len(new.token_ids) > 8) for new in plan.new] == [(1, 8, True)]


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_step_costs_the_same_however_many_wait(num_slots: int) -> None:
    """Not a matter of tens of microseconds: a queue that is looked through would cost a hundred times more."""

    def seconds(num_waiting: int) -> float:
        scheduler, ranks = _scheduler(num_slots=num_slots), Ranks(4)
        for number in range(64 + num_waiting):
            scheduler.add(Sequence(number, _prompt(number, 3), GREEDY))
        for slot in range(num_slots):
            plan = scheduler.plan(slot)
            assert plan is not None
            scheduler.collect(slot, ranks.follow(plan))
        times = []
        for _ in range(30):
            started = time.perf_counter()
            plan = scheduler.plan(0)
            times.append(time.perf_counter() - started)
            assert plan is not None
            scheduler.collect(0, ranks.follow(plan))
        return min(times)

    assert seconds(10_000) < 5 * seconds(10)
