"""One sequence's tokens and text. (placeholder until merged)"""

from __future__ import annotations

import secrets
import time

from mpiinfer.engine.request import Output, Request, TopToken
from mpiinfer.engine.sampling import Sampling
from mpiinfer.engine.stats import RequestTimes
from mpiinfer.engine.step import Sample
from mpiinfer.text.tokenizer import StopStrings, Tokenizer


class Generation:
    """One request on its way: its tokens so far, and whether its text is done."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, eos_token_ids: frozenset[int], max_positions: int
    ) -> None:
        self.request = request
        params = request.sampling
        seed = secrets.randbits(63) if params.seed is None else params.seed
        logprobs = -1 if params.logprobs is None else params.logprobs
        self.sampling = Sampling(params.temperature, params.top_k, params.top_p, seed, logprobs)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[TopToken]] = []
        self.finish_reason: str | None = None
        self.num_new_tokens = request.num_new_tokens(max_positions)
        self.admitted_s = time.perf_counter()
        self.first_token_s = self.last_token_s = 0.0
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset() if request.sampling.ignore_eos else eos_token_ids
        self._stream = tokenizer.stream()
        self._stops = StopStrings(request.sampling.stop)
        self._text: list[str] = []
        self._num_flushed = 0

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
        elif len(self.token_ids) == self.num_new_tokens:
            self.finish_reason = "length"

    def flush(self) -> None:
        """Make the text of the tokens that have none yet; a stop string in it ends the sequence there."""
        while self._num_flushed < len(self.token_ids):
            token = self.token_ids[self._num_flushed]
            self._num_flushed += 1
            if token in self._eos_token_ids:
                return
            piece, stopped = self._stops.push(self._stream.push(token))
            self._text.append(piece)
            if stopped:
                self.finish_reason = "stop"
                for values in (self.token_ids, self.logprobs, self.top_logprobs):
                    del values[self._num_flushed :]
                return

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
