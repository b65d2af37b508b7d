"""What a user asks for and gets: `SamplingParams`, `Request`, `Output`. Values only; every check names the fix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from mpiinfer.errors import RequestError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen.

    max_tokens: new ones at most. temperature: 0 is greedy. top_k: only so many of the likeliest (0: all). top_p: only
    the likeliest that together have this probability (1: all). min_p: only those at least this share as likely as the
    likeliest (0: all). repetition_penalty: divides positive logits of tokens that came before, in the prompt too, and
    multiplies negative ones (1: none; Keskar et al., 2019). presence_penalty, frequency_penalty: taken from the logit
    of a token that was generated, once, and for each time. logit_bias: added to the logits of these token ids.
    bad_words: texts that are not generated.

    seed: tokens depend on it and on the prompt only, not on other requests and, in fp32, not on the layout (16-bit sums
    over shards round differently); without one a fresh seed is drawn.

    stop: strings that end the text, which does not include them. stop_token_ids: token ids that end it. min_tokens:
    nothing ends it before so many. ignore_eos: go on past end-of-sequence tokens.

    n: answers to the prompt, which share its blocks of cache. The first is the one that n = 1 would give.

    logprobs: how many of the likeliest tokens to report beside each chosen one (0: the chosen one only; None: none).
    prompt_logprobs: the same for the tokens of the prompt.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str):
                msgspec.structs.force_setattr(self, name, (value,))
            elif isinstance(value, list):
                msgspec.structs.force_setattr(self, name, tuple(value))
        self._check_types()
        self._check(1 <= self.max_tokens <= MAX_COUNT, "max_tokens", f"must be 1 to {MAX_COUNT}")
        self._check(
            0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"must be 0 to max_tokens = {self.max_tokens}"
        )
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        self._check(finite, "temperature", "must be 0 (greedy) or more")
        self._check(0 < self.top_p <= 1, "top_p", "must be above 0, up to 1 (1: all tokens)")
        self._check(0 <= self.top_k <= MAX_COUNT, "top_k", f"must be 0 (all tokens) to {MAX_COUNT}")
        self._check(0 <= self.min_p <= 1, "min_p", "must be 0 (all tokens) to 1")
        positive = math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0
        self._check(positive, "repetition_penalty", "must be above 0 (1: none)")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(math.isfinite(getattr(self, name)), name, "must be a finite number (0: none)")
        self._check(self.seed is None or 0 <= self.seed < 1 << 63, "seed", "must be 0 or more, below 2^63")
        for name in ("stop", "bad_words"):
            self._check("" not in getattr(self, name), name, "an empty string is in every text: leave it out")
        for name in ("stop_token_ids", "logit_bias"):
            self._check(all(0 <= token <= MAX_COUNT for token in getattr(self, name)), name, "token ids are 0 or more")
        self._check(all(map(math.isfinite, self.logit_bias.values())), "logit_bias", "must be finite numbers")
        self._check(1 <= self.n <= MAX_SAMPLES, "n", f"must be 1 to {MAX_SAMPLES}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._check(value is None or 0 <= value <= MAX_LOGPROBS, name, f"must be 0 to {MAX_LOGPROBS}")

    def _check_types(self) -> None:
        """What the annotations say, since Python does not."""
        for name in ("max_tokens", "min_tokens", "top_k", "n"):
            self._check(_is_int(getattr(self, name)), name, "must be an integer")
        for name in ("seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._check(value is None or _is_int(value), name, "must be an integer")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            self._check(_is_number(getattr(self, name)), name, "must be a number")
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            strings = isinstance(value, tuple) and all(isinstance(text, str) for text in value)
            self._check(strings, name, "must be a tuple of strings")
        ids = isinstance(self.stop_token_ids, tuple) and all(map(_is_int, self.stop_token_ids))
        self._check(ids, "stop_token_ids", "must be a tuple of token ids")
        biases = isinstance(self.logit_bias, dict) and all(
            _is_int(token) and _is_number(bias) for token, bias in self.logit_bias.items()
        )
        self._check(biases, "logit_bias", "must be token ids and what is added to their logits")

    def _check(self, condition: bool, name: str, problem: str) -> None:
        if not condition:
            value = getattr(self, name)
            raise RequestError(f"{name} = {list(value) if isinstance(value, tuple) else value}: {problem}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# The wire form of a step holds 64 bits; nobody means more than this.
MAX_COUNT = (1 << 31) - 1
MAX_LOGPROBS = 20
MAX_SAMPLES = 1024


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, tokenised and checked. index: its place among the prompts of the call."""

    index: int
    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams

    def num_new_tokens(self, max_positions: int) -> int:
        """Tokens to generate at most: the last one is never fed back, so it needs no position."""
        return min(self.sampling.max_tokens, max_positions - len(self.prompt_token_ids) + 1)

    def capacity(self, max_positions: int) -> int:
        """Tokens whose keys and values it needs at most."""
        return len(self.prompt_token_ids) + self.num_new_tokens(max_positions) - 1

    def check_fits(self, max_positions: int, cache_tokens: int) -> None:
        """Raise RequestError where it needs more than the whole cache of `cache_tokens` tokens."""
        capacity = self.capacity(max_positions)
        if capacity > cache_tokens:
            raise RequestError(
                f"prompt {self.index}: needs {capacity} tokens of cache, the ranks have {cache_tokens}: lower "
                "max_tokens, raise [cache] memory in the layout, or use more ranks"
            )


class TopToken(msgspec.Struct, frozen=True):
    """A likely token and its log probability."""

    token_id: int
    logprob: float


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer to a prompt.

    text: the decoded tokens, without special tokens and without the stop string. token_ids: all that were generated,
    the one that ended them included. finish_reason: "stop" (end-of-sequence, stop string or stop token), "length",
    "cancelled", or "error". logprobs: the natural log probability of each token under the model (before temperature);
    top_logprobs: for each token the likeliest ones.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    top_logprobs: list[list[TopToken]] | None = None


class Output(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What came of one prompt: the fields of its first `Answer`, and what it was asked with.

    samples: all its answers, where several were asked for. prompt_logprobs: the log probability of each token of the
    prompt after those before it, None for the first one; prompt_top_logprobs: the likeliest in its place. error: why
    the prompt was refused, where finish_reason is "error".
    """

    id: str
    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    top_logprobs: list[list[TopToken]] | None = None
    samples: list[Answer] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[list[TopToken]] | None = None
    error: str | None = None

    @property
    def answers(self) -> list[Answer]:
        """All its answers, in a list of one where one was asked for."""
        return self.samples or [msgspec.convert(self, Answer, from_attributes=True)]


def check_prompt(index: int, token_ids: Sequence[int], *, vocab_size: int, max_positions: int) -> None:
    """Raise RequestError where the model cannot take these tokens."""
    if not token_ids:
        raise RequestError(f"prompt {index}: is empty: give at least one token")
    if len(token_ids) > max_positions:
        raise RequestError(
            f"prompt {index}: has {len(token_ids)} tokens, more than the model's context of {max_positions}: shorten it"
        )
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"prompt {index}: token id {wrong} is not in the vocabulary of 0 to {vocab_size - 1}")
