"""What a user asks for and gets: `SamplingParams`, `Request`, `Output`. Values only; every check names the fix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from mpiinfer.errors import RequestError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen.

    temperature: 0 is greedy. top_k: 0 is all. top_p: 1 is all. seed: tokens depend on it and on the prompt only,
    not on other requests and, in fp32, not on the layout (16-bit sums over shards round differently); without one a
    fresh seed is drawn. stop: strings that end the text, which
    does not include them. ignore_eos: go on past end-of-sequence tokens. logprobs: how many of the likeliest tokens
    to report beside each chosen one (0: the chosen one only; None: none at all).
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        elif isinstance(self.stop, list):
            msgspec.structs.force_setattr(self, "stop", tuple(self.stop))
        self._check_types()
        _require(1 <= self.max_tokens <= MAX_COUNT, "max_tokens", self.max_tokens, f"must be 1 to {MAX_COUNT}")
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        _require(finite, "temperature", self.temperature, "must be 0 (greedy) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0, up to 1 (1: all tokens)")
        _require(0 <= self.top_k <= MAX_COUNT, "top_k", self.top_k, f"must be 0 (all tokens) to {MAX_COUNT}")
        _require(self.seed is None or 0 <= self.seed < 1 << 63, "seed", self.seed, "must be 0 or more, below 2^63")
        _require("" not in self.stop, "stop", list(self.stop), "a stop string cannot be empty")
        limit = MAX_LOGPROBS
        _require(
            self.logprobs is None or 0 <= self.logprobs <= limit, "logprobs", self.logprobs, f"must be 0 to {limit}"
        )

    def _check_types(self) -> None:
        """What the annotations say, since Python does not."""
        for name in ("max_tokens", "top_k", "seed", "logprobs"):
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            _require(is_int or (value is None and name in ("seed", "logprobs")), name, value, "must be an integer")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            _require(isinstance(value, (int, float)) and not isinstance(value, bool), name, value, "must be a number")
        strings = isinstance(self.stop, tuple) and all(isinstance(stop, str) for stop in self.stop)
        _require(strings, "stop", self.stop, "must be a tuple of strings")


# The wire form of a step holds 64 bits; nobody means more than this.
MAX_COUNT = (1 << 31) - 1
MAX_LOGPROBS = 20


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


class Output(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to one prompt.

    text: the decoded tokens, without special tokens and without the stop string. token_ids: all that were generated,
    the end-of-sequence token included. finish_reason: "stop" (end-of-sequence or stop string) or "length". logprobs:
    the natural log probability of each token under the model (before temperature); top_logprobs: for each token the
    likeliest ones.
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


def _require(condition: bool, name: str, value: object, problem: str) -> None:
    if not condition:
        raise RequestError(f"{name} = {value}: {problem}")
