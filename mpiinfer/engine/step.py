"""`StepPlan` and `StepResult`: what the head tells its ranks each step, and what comes back.

A plan is a difference: a sequence's prompt and sampling travel once, later steps only name it. Typed, numbered and
versioned msgpack, no pickle, so that a recorded list of plans can be replayed. Followers hold no policy.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mpiinfer.engine.sampling import Sampling

VERSION = 3

PlanKind = Literal["run", "rest", "drain"]


class NewSequence(msgspec.Struct, array_like=True, frozen=True):
    """A sequence that begins, or begins again after its blocks were taken from it.

    token_ids: its prompt of `num_prompt` tokens, and what it has generated. blocks: those that already hold the keys
    and values of its first tokens, since another sequence began with the same ones.
    """

    sequence: int
    token_ids: list[int]
    num_prompt: int
    blocks: list[int]
    sampling: Sampling


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one sequence in a step: `num_tokens` of them at positions from `start` on.

    token: the token at position `start` where the ranks do not know it yet (then num_tokens is 1), else -1. blocks:
    those that the sequence gets for these tokens, beside the ones that it has. samples: whether the last token's
    logits choose the next token.
    """

    sequence: int
    start: int
    num_tokens: int
    token: int
    blocks: list[int]
    samples: bool


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """What every rank of a replica does next. `freed` sequences are forgotten before `new` ones begin.

    kind: "run" computes `chunks`; "rest" computes nothing, and the next plan may come late; "drain" ends the run after
    all earlier steps.
    """

    version: int
    number: int
    kind: PlanKind
    slot: int
    freed: list[int]
    new: list[NewSequence]
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_final(self) -> bool:
        return self.kind == "drain"

    @property
    def is_rest(self) -> bool:
        return self.kind == "rest"


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """The token chosen for a sequence, its log probability, and the likeliest tokens where they were asked for."""

    sequence: int
    token: int
    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]


class PromptScore(msgspec.Struct, array_like=True, frozen=True):
    """The log probability of the token at `position` of a sequence's prompt, and the likeliest in its place."""

    sequence: int
    position: int
    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """The samples of the step `number`, one for each chunk that samples, in the plan's order; and scores of prompts."""

    version: int
    number: int
    samples: list[Sample]
    scores: list[PromptScore] = []


_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_result_decoder = msgspec.msgpack.Decoder(StepResult)


def encode(message: StepPlan | StepResult) -> bytes:
    """The wire form."""
    return _encoder.encode(message)


def decode_plan(data: bytes) -> StepPlan:
    """Raises RuntimeError where another version wrote it: all ranks must run the same mpiinfer."""
    plan = _plan_decoder.decode(data)
    _check_version(plan.version)
    return plan


def decode_result(data: bytes) -> StepResult:
    """Raises RuntimeError like `decode_plan`."""
    result = _result_decoder.decode(data)
    _check_version(result.version)
    return result


def _check_version(version: int) -> None:
    if version != VERSION:
        raise RuntimeError(f"a step of version {version} reached a rank of version {VERSION}: mixed installations")
