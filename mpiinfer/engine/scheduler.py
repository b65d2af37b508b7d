"""`Scheduler`: which sequences run in which slot at each step. Pure policy over integers, on the head rank only.

Promises: first come, first served; sequences are spread evenly over the slots; a step computes at most
`max_step_tokens` prompt tokens beside one token for each running sequence; reserved cache never exceeds
`cache_tokens`. Refuses to know what a token means or when a text is done: the caller says `finish`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mpiinfer.engine.step import VERSION, Chunk, NewSequence, PlanKind, StepPlan, StepResult


@dataclass(slots=True)
class Sequence:
    """A sequence on its way. num_cached: tokens whose keys and values are computed or planned."""

    new: NewSequence
    num_cached: int = 0
    last_token: int = -1

    @property
    def in_prompt(self) -> bool:
        return self.num_cached < len(self.new.prompt)


@dataclass(slots=True)
class Slot:
    """One micro-batch: its sequences in order of admission, and whether a step of it is under way."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    in_flight: bool = False


class Scheduler:
    """Holds waiting and running sequences; `plan` and `collect` alternate for each slot."""

    def __init__(
        self, *, num_slots: int, cache_tokens: int, max_step_tokens: int, max_sequences: int | None = None
    ) -> None:
        """max_sequences: how many run at once at most (None: as many as the cache holds)."""
        self.cache_tokens = cache_tokens
        self.max_step_tokens = max_step_tokens
        self.max_sequences = max_sequences
        self.num_reserved = 0
        self.waiting: deque[NewSequence] = deque()
        self.slots = [Slot() for _ in range(num_slots)]
        self._slot_of: dict[int, Slot] = {}
        self._freed: list[int] = []
        self._number = 0

    def add(self, new: NewSequence) -> None:
        """Queue a sequence. Its capacity must be `cache_tokens` or less."""
        assert new.capacity <= self.cache_tokens
        self.waiting.append(new)

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self._slot_of

    def plan(self, slot_index: int) -> StepPlan | None:
        """The slot's next step, or None when it has no sequence to run. The slot's last step must be collected."""
        slot = self.slots[slot_index]
        assert not slot.in_flight
        decoding = [self._decode(s) for s in slot.sequences.values() if not s.in_prompt]
        budget = self.max_step_tokens
        prompts: list[Chunk] = []
        for sequence in slot.sequences.values():
            if sequence.in_prompt and budget:
                prompts.append(self._prompt_chunk(sequence, budget))
                budget -= prompts[-1].num_tokens
        new: list[NewSequence] = []
        while budget and self._can_admit(slot):
            new.append(self.waiting.popleft())
            prompts.append(self._prompt_chunk(self._admit(slot, new[-1]), budget))
            budget -= prompts[-1].num_tokens
        if not decoding and not prompts:
            return None
        slot.in_flight = True
        return self._numbered("run", slot_index, new, decoding + prompts)

    def drain(self) -> StepPlan:
        """The plan that ends a run."""
        return self._numbered("drain", 0, [], [])

    def collect(self, slot_index: int, result: StepResult) -> None:
        """Take in a step's samples: they are what their sequences feed next."""
        self.slots[slot_index].in_flight = False
        for sample in result.samples:
            self._slot_of[sample.sequence].sequences[sample.sequence].last_token = sample.token

    def finish(self, sequence: int) -> None:
        """Forget a sequence; the ranks hear of it with the next plan."""
        done = self._slot_of.pop(sequence).sequences.pop(sequence)
        self.num_reserved -= done.new.capacity
        self._freed.append(sequence)

    def _numbered(self, kind: PlanKind, slot: int, new: list[NewSequence], chunks: list[Chunk]) -> StepPlan:
        freed, self._freed = self._freed, []
        number, self._number = self._number, self._number + 1
        return StepPlan(VERSION, number, kind, slot, freed, new, chunks)

    def _can_admit(self, slot: Slot) -> bool:
        """The longest-waiting sequence goes first or nobody does; no slot takes more than its even share."""
        num_running, num_wanted = len(self._slot_of), len(self.waiting) + len(self._slot_of)
        if self.max_sequences is not None:
            num_wanted = min(num_wanted, self.max_sequences)
        if not self.waiting or num_running >= num_wanted:
            return False
        share = -(-num_wanted // len(self.slots))
        fits = self.num_reserved + self.waiting[0].capacity <= self.cache_tokens
        return fits and len(slot.sequences) < share

    def _admit(self, slot: Slot, new: NewSequence) -> Sequence:
        self.num_reserved += new.capacity
        self._slot_of[new.sequence] = slot
        sequence = slot.sequences[new.sequence] = Sequence(new)
        return sequence

    def _prompt_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        start, length = sequence.num_cached, len(sequence.new.prompt)
        num_tokens = min(budget, length - start)
        sequence.num_cached += num_tokens
        return Chunk(sequence.new.sequence, start, num_tokens, -1, sequence.num_cached == length)

    def _decode(self, sequence: Sequence) -> Chunk:
        start = sequence.num_cached
        sequence.num_cached += 1
        return Chunk(sequence.new.sequence, start, 1, sequence.last_token, True)
