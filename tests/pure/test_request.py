"""Sampling parameters and prompts that mean nothing are refused in one line with the fix."""

from __future__ import annotations

from typing import Any

import pytest

from mpiinfer.engine.request import Request, SamplingParams, check_prompt
from mpiinfer.errors import RequestError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -0.1}, ["temperature = -0.1", "0 (greedy) or more"]),
        ({"temperature": float("nan")}, ["temperature = nan"]),
        ({"temperature": float("inf")}, ["temperature = inf"]),
        ({"top_p": 0.0}, ["top_p = 0.0"]),
        ({"top_p": 1.1}, ["top_p = 1.1"]),
        ({"top_k": -1}, ["top_k = -1"]),
        ({"max_tokens": 0}, ["max_tokens = 0"]),
        ({"seed": -1}, ["seed = -1"]),
        ({"seed": 1 << 63}, ["seed"]),
        ({"stop": ("",)}, ["stop"]),
        ({"logprobs": -1}, ["logprobs = -1"]),
        ({"logprobs": 21}, ["logprobs = 21", "0 to 20"]),
        ({"top_k": 10**23}, ["top_k"]),
        ({"max_tokens": 10**23}, ["max_tokens"]),
        ({"max_tokens": 2.5}, ["max_tokens = 2.5", "integer"]),
        ({"max_tokens": True}, ["max_tokens = True", "integer"]),
        ({"seed": 2.5}, ["seed = 2.5", "integer"]),
        ({"temperature": "hot"}, ["temperature = hot", "number"]),
        ({"stop": (5,)}, ["stop", "strings"]),
    ],
)
def test_bad_sampling(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "prompt 3: is empty"),
        ([1] * 9, "prompt 3: has 9 tokens, more than the model's context of 8"),
        ([1, 100], "token id 100 is not in the vocabulary of 0 to 99"),
        ([-1], "token id -1"),
    ],
)
def test_bad_prompts(token_ids: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_prompt(3, token_ids, vocab_size=100, max_positions=8)


def _request(num_prompt: int, max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(index=0, id="0", prompt=None, prompt_token_ids=[1] * num_prompt, sampling=sampling)


def test_the_whole_context_may_be_prompt() -> None:
    """The last token is never fed back, so a full prompt still gets one answer token."""
    check_prompt(0, [1] * 8, vocab_size=2, max_positions=8)
    assert _request(8, 64).num_new_tokens(8) == 1
    assert _request(8, 64).capacity(8) == 8
    assert _request(5, 64).num_new_tokens(8) == 4
    assert _request(5, 2).num_new_tokens(8) == 2


def test_a_request_larger_than_the_cache() -> None:
    _request(5, 4).check_fits(100, 8)
    with pytest.raises(RequestError, match="needs 8 tokens of cache, the ranks have 7"):
        _request(5, 4).check_fits(100, 7)


def test_stop_may_be_one_string_or_a_list() -> None:
    assert SamplingParams(stop="abc").stop == ("abc",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
