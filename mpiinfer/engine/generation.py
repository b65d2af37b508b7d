"""`Generation`: one answer on its way: its tokens so far, their text, and whether it has ended; `Answers` puts those to
one prompt together.

Promises: `take` decides from token ids alone, at once; `flush` makes the text later, while the next step is under way.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from mpiinfer.engine.request import Answer, Output, Request, SamplingParams, TopToken
from mpiinfer.engine.sampling import Sampling
from mpiinfer.engine.stats import RequestTimes
from mpiinfer.engine.step import PromptScore, Sample
from mpiinfer.text.detokenize import Stream
from mpiinfer.text.tokenizer import StopStrings, Tokenizer

# Between the seeds of the answers to one prompt; any odd number will do, since seeds are hashed.
SEED_STRIDE = 0x9E3779B97F4A7C15
MAX_SEED = (1 << 63) - 1


class Answers:
    """The answers to one request, and the scores of its prompt, as they come."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, eos_token_ids: frozenset[int], max_positions: int
    ) -> None:
        self.request = request
        params = request.sampling
        endings = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        first = _wire(params, tokenizer, endings)
        num_new_tokens = request.num_new_tokens(max_positions)
        self.generations = [
            Generation(self, _of_sample(first, number), tokenizer.stream(), endings, num_new_tokens)
            for number in range(params.n)
        ]
        self._scores: dict[int, PromptScore] = {}  # by position; a sequence that is computed again brings them again

    def score(self, score: PromptScore) -> None:
        """Add what is known of a token of the prompt."""
        self._scores[score.position] = score

    @property
    def are_finished(self) -> bool:
        return all(generation.is_flushed for generation in self.generations)

    def output(self) -> Output:
        """What came of the request, once all its answers are finished."""
        request, answers = self.request, [generation.answer() for generation in self.generations]
        wanted = request.sampling.prompt_logprobs
        scores = [self._scores.get(position) for position in range(len(request.prompt_token_ids))]
        return Output(
            id=request.id,
            index=request.index,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            **msgspec.structs.asdict(answers[0]),
            samples=answers if len(answers) > 1 else None,
            prompt_logprobs=None if wanted is None else [score.logprob if score else None for score in scores],
            prompt_top_logprobs=[_top_tokens(score) if score else [] for score in scores] if wanted else None,
        )


class Generation:
    """One of `answers` on its way: its tokens so far, and whether its text is done."""

    def __init__(
        self,
        answers: Answers,
        sampling: Sampling,
        stream: Stream,
        endings: frozenset[int],
        num_new_tokens: int,
    ) -> None:
        """sampling: as the ranks are told. endings: ids that end it. num_new_tokens: the most it may have."""
        self.answers = answers
        self.sampling = sampling
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[TopToken]] = []
        self.finish_reason: str | None = None
        self.num_new_tokens = num_new_tokens
        self.admitted_s = time.perf_counter()
        self.first_token_s = self.last_token_s = 0.0
        self._params = answers.request.sampling
        self._endings = endings
        self._stream = stream
        self._stops = StopStrings(self._params.stop)
        self._text: list[str] = []
        self._num_flushed = 0

    @property
    def is_flushed(self) -> bool:
        """Whether it has ended and its text is made."""
        return self.finish_reason is not None and self._num_flushed >= len(self.token_ids)

    def take(self, sample: Sample) -> None:
        """Add a token; sets `finish_reason` where it is the last one."""
        self.last_token_s = time.perf_counter()
        if not self.token_ids:
            self.first_token_s = self.last_token_s
        self.token_ids.append(sample.token)
        self.logprobs.append(sample.logprob)
        self.top_logprobs.append(_top_tokens(sample))
        if sample.token in self._endings:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.num_new_tokens:
            self.finish_reason = "length"

    def flush(self) -> None:
        """Make the text of the tokens that have none yet; a stop string in it ends the sequence there."""
        while self._num_flushed < len(self.token_ids):
            token = self.token_ids[self._num_flushed]
            self._num_flushed += 1
            if token in self._endings:
                return
            piece, stopped = self._stream.push(token), False
            if self._num_flushed > self._params.min_tokens:  # before that, no stop string counts
                piece, stopped = self._stops.push(piece)
            self._text.append(piece)
            if stopped:
                self.finish_reason = "stop"
                for values in (self.token_ids, self.logprobs, self.top_logprobs):
                    del values[self._num_flushed :]
                return

    def answer(self) -> Answer:
        """The answer, once it is finished."""
        assert self.finish_reason is not None
        wanted = self._params.logprobs
        return Answer(
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


def _wire(params: SamplingParams, tokenizer: Tokenizer, endings: frozenset[int]) -> Sampling:
    """The sampling that the ranks are told. A seed that is not given is drawn here, so that all shards agree."""
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias=sorted(params.logit_bias.items()),
        min_tokens=params.min_tokens,
        endings=sorted(endings) if params.min_tokens else [],
        bad_words=_token_ids_of(params.bad_words, tokenizer),
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )


def _of_sample(first: Sampling, number: int) -> Sampling:
    """The sampling of another answer to the same prompt, whose scores the first one brings."""
    if not number:
        return first
    seed = (first.seed + number * SEED_STRIDE) & MAX_SEED
    return msgspec.structs.replace(first, seed=seed, prompt_logprobs=-1)


def _top_tokens(of: Sample | PromptScore) -> list[TopToken]:
    return [TopToken(*pair) for pair in zip(of.top_tokens, of.top_logprobs, strict=True)]


def _token_ids_of(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """A word at the start of a line and after a space are different tokens: both."""
    spelled = (tokenizer.encode(start + word, add_special=False) for word in words for start in ("", " "))
    return [list(ids) for ids in dict.fromkeys(map(tuple, spelled)) if ids]
