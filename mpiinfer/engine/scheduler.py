"""`Scheduler`: which sequences run in which slot at each step. Pure policy over integers, on the head rank only.

Promises: sequences are served in the order of their numbers. They join and leave at every step; a step computes one
token of each sequence that is past its tokens, and parts of prompts beside them, within its budget. Where blocks run
out the youngest sequence gives its own up and is computed again later, so that the oldest always goes on: nobody
starves and nothing deadlocks. Refuses to know what a token means or when a text is done: the caller says `finish`.

Between two steps a sequence belongs to no slot, so slots stay even however sequences come and go; parts of one prompt
may be under way in several slots at once. Every rank executes plans in their order, whatever their slot: so blocks may
be taken from a sequence while a step of it is under way, and be given to another in the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import ceil, sqrt
from typing import NamedTuple

from mpiinfer.engine.blocks import ROOT, BlockPool
from mpiinfer.engine.sampling import Sampling
from mpiinfer.engine.step import VERSION, Chunk, NewSequence, PlanKind, StepPlan, StepResult

# A prompt is not cut into smaller parts than this for the sake of even slots: smaller products cost more by the token.
MIN_CHUNK_TOKENS = 64
# Into how many parts for each slot the prompts at hand are cut, so that the stages overlap on them.
PARTS_PER_SLOT = 2


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence on its way.

    token_ids: the prompt of `num_prompt` tokens, and what was generated. shares: whether it may begin with blocks that
    others have filled. num_computed: tokens whose keys and values are computed or planned. num_known: tokens that the
    ranks know, 0 where they have not heard of it. is_awaited: a step under way will sample its next token. follows:
    another one of the same prompt, which it waits for so as to share all of its blocks.
    """

    number: int
    token_ids: list[int]
    sampling: Sampling
    shares: bool = True
    follows: int | None = None
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_known: int = 0
    blocks: list[int] = field(default_factory=list)
    is_awaited: bool = False
    _keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that are there and not computed."""
        return len(self.token_ids) - self.num_computed

    def keys(self, pool: BlockPool, count: int) -> SequenceOf[bytes]:
        """The keys of its first `count` blocks, which its tokens fill."""
        size = pool.block_tokens
        while len(self._keys) < count:
            at = len(self._keys)
            before = self._keys[-1] if at else ROOT
            self._keys.append(pool.next_key(before, self.token_ids[at * size : (at + 1) * size]))
        return self._keys[:count]


class Limits(NamedTuple):
    """step_tokens: budget of a step, in tokens at the start of a sequence. sequences: how many run at once at most.

    attention_cost: what one token of context adds to the cost of a token, which is 1 without context. A part far down
    a long prompt is cut shorter for it, so that steps take even times.
    """

    step_tokens: int
    sequences: int
    attention_cost: float = 0.0


@dataclass(slots=True)
class Counts:
    """What has happened since the start. shared_tokens: of prompts, not computed since their blocks were there."""

    preemptions: int = 0
    computed_tokens: int = 0
    shared_tokens: int = 0


class Scheduler:
    """Holds waiting and running sequences; `plan` and `collect` alternate for each slot."""

    def __init__(self, pool: BlockPool, *, num_slots: int, limits: Limits) -> None:
        self.pool = pool
        self.num_slots = num_slots
        self.limits = limits
        self.counts = Counts()
        self._sequences: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}  # in the order of their numbers
        self._waiting: list[int] = []  # a heap of numbers; those that were finished meanwhile are still in it
        self._in_flight: set[int] = set()
        self._freed: list[int] = []
        self._number = 0

    # ---- what the caller tells

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. All the tokens that it may come to fit the pool; its number is a new one."""
        self._sequences[sequence.number] = sequence
        heappush(self._waiting, sequence.number)

    def collect(self, slot: int, result: StepResult) -> None:
        """Take in the samples of the slot's step: they are what their sequences feed next."""
        self._in_flight.remove(slot)
        for sample in result.samples:
            sequence = self._sequences.get(sample.sequence)
            if sequence is not None:  # else it was finished while the step was under way
                sequence.token_ids.append(sample.token)
                sequence.is_awaited = False

    def finish(self, number: int) -> None:
        """Forget a sequence, running or waiting; the ranks hear of it with the next plan."""
        sequence = self._sequences.pop(number)
        if number in self._running:
            self._stop(sequence)

    # ---- what the caller asks

    @property
    def is_done(self) -> bool:
        return not self._sequences

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def room(self) -> int:
        """How many sequences to add now: as many as may run, and one more, where none waits already."""
        return 0 if self.num_waiting else self.limits.sequences + 1 - self.num_running

    def plan(self, slot: int) -> StepPlan | None:
        """The slot's next step, or None when there is nothing to run in it. Its last step must be collected."""
        assert slot not in self._in_flight
        share = self._share()
        ready = [sequence for sequence in self._running.values() if not sequence.is_awaited]
        num_decodes = min(share, sum(sequence.num_pending == 1 for sequence in ready))
        budget = self._prompt_budget(num_decodes)
        chunks: list[Chunk] = []
        for sequence in ready:
            if sequence.number not in self._running:
                continue  # it has just given its blocks up to an older one
            if sequence.num_pending == 1:
                num_tokens, cost, num_decodes = min(1, max(0, num_decodes)), 0.0, num_decodes - 1
            else:
                num_tokens, cost = self._part(sequence, budget)
            if num_tokens and self._make_room(sequence, num_tokens):
                chunks.append(self._chunk(sequence, num_tokens))
                budget -= cost
        new: list[NewSequence] = []
        while budget >= 1 and len(chunks) < share and self._can_admit():
            sequence = self._admit()
            new.append(_new(sequence))
            num_tokens, cost = self._part(sequence, budget)
            chunks.append(self._chunk(sequence, num_tokens))
            budget -= cost
        if not chunks:
            return None
        self._in_flight.add(slot)
        return self._numbered("run", slot, new, chunks)

    def command(self, kind: PlanKind) -> StepPlan:
        """A plan that computes nothing."""
        return self._numbered(kind, 0, [], [])

    # ---- inside: how much

    def _share(self) -> int:
        """Sequences of one slot, where they are spread evenly."""
        return ceil(min(len(self._sequences), self.limits.sequences) / self.num_slots)

    def _prompt_budget(self, num_decodes: int) -> float:
        """What parts of prompts may cost in this step, beside so many single tokens."""
        least = min(MIN_CHUNK_TOKENS, self.limits.step_tokens)
        budget = max(least, self.limits.step_tokens - num_decodes)
        if self.num_slots == 1:
            return budget
        return min(budget, max(least, ceil(self._num_prompt_tokens() / (self.num_slots * PARTS_PER_SLOT))))

    def _num_prompt_tokens(self) -> int:
        """Of the prompts at hand: those that are being computed, and those that could be admitted."""
        running = sum(len(sequence.token_ids) for sequence in self._running.values() if sequence.num_pending > 1)
        first = islice(self._waiting, max(0, self.limits.sequences - len(self._running)))
        waiting = (self._sequences.get(number) for number in first)
        return running + sum(len(sequence.token_ids) for sequence in waiting if sequence is not None)

    def _part(self, sequence: Sequence, budget: float) -> tuple[int, float]:
        """How many of the sequence's tokens cost at most `budget`, and what they cost; one token where any is left.

        n tokens after a context of s cost n + a (n s + n^2 / 2), with a = `attention_cost`.
        """
        if budget < 1:
            return 0, 0.0
        start, a = sequence.num_computed, self.limits.attention_cost
        each = 1 + a * start
        most = budget / each if not a else (sqrt(each * each + 2 * a * budget) - each) / a
        num_tokens = min(sequence.num_pending, max(1, int(most)))
        return num_tokens, num_tokens * each + a * num_tokens * num_tokens / 2

    # ---- inside: who

    def _can_admit(self) -> bool:
        """Whether the longest-waiting sequence may begin: it goes first, or nobody does."""
        sequence = self._first_waiting()
        if sequence is None or sequence.is_awaited or len(self._running) >= self.limits.sequences:
            return False
        if not self._running:
            return True
        leader = None if sequence.follows is None else self._running.get(sequence.follows)
        if leader is not None and leader.num_pending > 1:
            return False
        num_shared, num_kept = self.pool.num_shareable(self._shareable(sequence))
        wanted = self.pool.blocks_for(len(sequence.token_ids)) - num_shared + num_kept
        return wanted + len(self._running) <= self.pool.num_available  # those who run will soon want a block each

    def _first_waiting(self) -> Sequence | None:
        while self._waiting:
            sequence = self._sequences.get(self._waiting[0])
            if sequence is not None:
                return sequence
            heappop(self._waiting)
        return None

    def _admit(self) -> Sequence:
        sequence = self._sequences[heappop(self._waiting)]
        assert not self._running or next(reversed(self._running)) < sequence.number
        self._running[sequence.number] = sequence
        sequence.blocks = self.pool.share(self._shareable(sequence))
        sequence.num_computed = len(sequence.blocks) * self.pool.block_tokens
        sequence.num_known = len(sequence.token_ids)
        self.counts.shared_tokens += sequence.num_computed
        return sequence

    def _shareable(self, sequence: Sequence) -> SequenceOf[bytes]:
        """Keys of the blocks that others may have filled: never its last token's, which has to be computed."""
        count = (len(sequence.token_ids) - 1) // self.pool.block_tokens
        return sequence.keys(self.pool, count) if sequence.shares else []

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """See that there are blocks for its next tokens, at the cost of the youngest; False if it is the youngest."""
        while self._num_missing(sequence, num_tokens) > self.pool.num_available:
            youngest = next(reversed(self._running.values()))
            if youngest is sequence:
                return False
            self._stop(youngest)
            heappush(self._waiting, youngest.number)
            self.counts.preemptions += 1
        return True

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        return self.pool.blocks_for(sequence.num_computed + num_tokens) - len(sequence.blocks)

    def _stop(self, sequence: Sequence) -> None:
        del self._running[sequence.number]
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed, sequence.num_known = [], 0, 0
        self._freed.append(sequence.number)

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        """Plan the sequence's next tokens. There are blocks for them."""
        blocks = self.pool.allocate(self._num_missing(sequence, num_tokens))
        sequence.blocks += blocks
        start = sequence.num_computed
        stop = sequence.num_computed = start + num_tokens
        token = -1
        if sequence.num_known < stop:
            token, sequence.num_known = sequence.token_ids[start], stop
        sequence.is_awaited = stop == len(sequence.token_ids)
        self.counts.computed_tokens += num_tokens
        size = self.pool.block_tokens
        for index in range(start // size, stop // size):
            self.pool.publish(sequence.blocks[index], sequence.keys(self.pool, index + 1)[index])
        return Chunk(sequence.number, start, num_tokens, token, blocks, sequence.is_awaited)

    def _numbered(self, kind: PlanKind, slot: int, new: list[NewSequence], chunks: list[Chunk]) -> StepPlan:
        freed, self._freed = self._freed, []
        number, self._number = self._number, self._number + 1
        return StepPlan(VERSION, number, kind, slot, freed, new, chunks)


def _new(sequence: Sequence) -> NewSequence:
    return NewSequence(
        sequence.number, list(sequence.token_ids), sequence.num_prompt, list(sequence.blocks), sequence.sampling
    )
