"""The head's side of a run: requests into the scheduler, plans out, results into texts and outputs.

Runs on the first rank of each replica; the ranks behind it only execute plans. Text is handled here, one request at a
time: the scheduler and the ranks see token ids alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from mpiinfer.engine.request import Output, Request, TopToken
from mpiinfer.engine.scheduler import Scheduler
from mpiinfer.engine.stats import RequestTimes
from mpiinfer.engine.step import NewSequence, Sample, decode_result, encode
from mpiinfer.text.tokenizer import StopStrings, Tokenizer

OnFinish = Callable[[Output], None]


class Generation:
    """One request on its way: its tokens so far, and whether its text is done."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, eos_token_ids: frozenset[int], max_positions: int
    ) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[TopToken]] = []
        self.finish_reason: str | None = None
        self.num_new_tokens = request.num_new_tokens(max_positions)
        self.admitted_s = self.first_token_s = self.last_token_s = 0.0
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset() if request.sampling.ignore_eos else eos_token_ids
        self._stream = tokenizer.stream()
        self._stops = StopStrings(request.sampling.stop)
        self._text: list[str] = []

    def take(self, sample: Sample) -> None:
        """Add a token; sets `finish_reason` where it is the last one."""
        self.last_token_s = time.perf_counter()
        if not self.token_ids:
            self.first_token_s = self.last_token_s
        self.token_ids.append(sample.token)
        self.logprobs.append(sample.logprob)
        self.top_logprobs.append([TopToken(*pair) for pair in zip(sample.top_tokens, sample.top_logprobs, strict=True)])
        if sample.token in self._eos_token_ids:
            self.finish_reason = "stop"
            return
        piece, stopped = self._stops.push(self._stream.push(sample.token))
        self._text.append(piece)
        if stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.num_new_tokens:
            self.finish_reason = "length"

    def output(self) -> Output:
        """The answer, once it is finished."""
        assert self.finish_reason is not None
        request, wanted = self.request, self.request.sampling.logprobs
        return Output(
            id=request.id,
            index=request.index,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            text="".join(self._text) + self._rest(),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            logprobs=None if wanted is None else self.logprobs,
            top_logprobs=self.top_logprobs if wanted else None,
        )

    def times(self) -> RequestTimes:
        """When its tokens came, counted from its admission."""
        return RequestTimes(
            len(self.token_ids), self.first_token_s - self.admitted_s, self.last_token_s - self.admitted_s
        )

    def _rest(self) -> str:
        """What the stream held back; a stop string may still end inside it."""
        piece, stopped = self._stops.push(self._stream.finish())
        return piece if stopped else piece + self._stops.finish()


class HeadLoop:
    """Feeds one replica with `requests`. Implements the executor's `Head`."""

    def __init__(
        self,
        requests: Sequence[Request],
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        max_positions: int,
        on_finish: OnFinish | None = None,
    ) -> None:
        self.outputs: list[Output] = []
        self.times: list[RequestTimes] = []
        self._scheduler = scheduler
        self._on_finish = on_finish
        self._running: dict[int, Generation] = {}
        for sequence, request in enumerate(requests):
            generation = Generation(request, tokenizer, eos_token_ids, max_positions)
            self._running[sequence] = generation
            scheduler.add(_new_sequence(sequence, request, max_positions))

    def next_plan(self, slot: int) -> bytes | None:
        plan = self._scheduler.plan(slot)
        if plan is None:
            return None
        for new in plan.new:
            self._running[new.sequence].admitted_s = time.perf_counter()
        return encode(plan)

    def take_result(self, slot: int, data: bytes) -> None:
        result = decode_result(data)
        self._scheduler.collect(slot, result)
        for sample in result.samples:
            generation = self._running[sample.sequence]
            generation.take(sample)
            if generation.finish_reason is not None:
                self._finish(sample.sequence)

    def final_plan(self) -> bytes | None:
        return encode(self._scheduler.drain()) if self._scheduler.is_done else None

    def _finish(self, sequence: int) -> None:
        self._scheduler.finish(sequence)
        generation = self._running.pop(sequence)
        output = generation.output()
        self.outputs.append(output)
        self.times.append(generation.times())
        if self._on_finish is not None:
            self._on_finish(output)


def _new_sequence(sequence: int, request: Request, max_positions: int) -> NewSequence:
    sampling = request.sampling
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    logprobs = -1 if sampling.logprobs is None else sampling.logprobs
    return NewSequence(
        sequence,
        request.prompt_token_ids,
        request.capacity(max_positions),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        seed,
        logprobs,
    )
