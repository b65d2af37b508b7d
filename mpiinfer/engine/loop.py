"""The head's side of a run: requests into the scheduler, plans out, results into texts and outputs.

Runs on the first rank of each replica; the ranks behind it only execute plans. A result is taken in two parts: token
ids decide at once what runs next, texts follow while the next step is under way. So a stop string ends a sequence one
step late, and what that step gave is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mpiinfer.engine.generation import Answers, Generation
from mpiinfer.engine.inbox import Inbox
from mpiinfer.engine.request import Request
from mpiinfer.engine.scheduler import Scheduler, Sequence
from mpiinfer.engine.stats import RequestTimes
from mpiinfer.engine.step import decode_result, encode

# Makes what a request becomes.
Begin = Callable[[Request], Answers]
# Waits, asleep between two looks, until a test is true; returns the seconds that it took.
Wait = Callable[[Callable[[], bool]], float]


class HeadLoop:
    """Feeds one replica from `inbox`. Implements the executor's `Head`."""

    def __init__(self, inbox: Inbox, scheduler: Scheduler, begin: Begin, wait: Wait) -> None:
        self.times: list[RequestTimes] = []
        self.idle_s = 0.0
        self._inbox = inbox
        self._scheduler = scheduler
        self._begin = begin
        self._wait = wait
        self._num_sequences = 0
        self._generations: dict[int, Generation] = {}
        self._behind: deque[int] = deque()  # sequences with tokens whose text is still to be made

    def next_plan(self, slot: int) -> bytes | None:
        self._take_in()
        plan = self._scheduler.plan(slot)
        return None if plan is None else encode(plan)

    def take_result(self, slot: int, data: bytes) -> None:
        result = decode_result(data)
        self._scheduler.collect(slot, result)
        for score in result.scores:
            if score.sequence in self._generations:
                self._generations[score.sequence].answers.score(score)
        for sample in result.samples:
            generation = self._generations.get(sample.sequence)
            if generation is not None and generation.finish_reason is None:
                generation.take(sample)
                if generation.finish_reason is not None:
                    self._scheduler.finish(sample.sequence)
                self._behind.append(sample.sequence)

    def catch_up(self) -> None:
        while self._behind:
            self._make_text(self._behind.popleft())

    def pause(self) -> bytes | None:
        self.catch_up()
        self._take_in()
        if not self._scheduler.is_done:
            return None
        return encode(self._scheduler.command("drain" if self._inbox.is_closed else "rest"))

    def wait(self) -> None:
        self.idle_s += self._wait(self._has_work)

    def _has_work(self) -> bool:
        self._take_in()
        return not self._scheduler.is_done or self._inbox.is_closed

    def _take_in(self) -> None:
        """New requests into the scheduler, cancelled ones out of it."""
        for request in self._inbox.take(self._scheduler.room):
            first = self._num_sequences
            for number, generation in enumerate(self._begin(request).generations, first):
                self._generations[number] = generation
                self._scheduler.add(_sequence(number, first, generation))
                self._num_sequences += 1
        for index in self._inbox.take_cancelled():
            self._cancel(index)

    def _cancel(self, index: int) -> None:
        """Its answer is what there is of it so far."""
        for number, generation in list(self._generations.items()):
            if generation.answers.request.index == index and generation.finish_reason is None:
                generation.finish_reason = "cancelled"
                self._scheduler.finish(number)
                self._behind.append(number)

    def _make_text(self, number: int) -> None:
        generation = self._generations.get(number)
        if generation is None:
            return
        had_ended = generation.finish_reason is not None
        generation.flush()
        if generation.finish_reason is None:
            return
        if not had_ended:  # a stop string has ended it, which the token ids did not show
            self._scheduler.finish(number)
        del self._generations[number]
        self.times.append(generation.times())
        if generation.answers.are_finished:
            self._inbox.deliver(generation.answers.output())


def _sequence(number: int, first: int, generation: Generation) -> Sequence:
    """For the scheduler: the answers to one prompt share its blocks, but where its log probabilities are wanted it is
    computed."""
    prompt = list(generation.answers.request.prompt_token_ids)
    shares = generation.sampling.prompt_logprobs < 0
    return Sequence(number, prompt, generation.sampling, shares, None if number == first else first)
