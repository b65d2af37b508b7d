"""`StepPlan` and `StepResult`: what the head tells its ranks each step, and what comes back.

A plan is a difference: a sequence's prompt and sampling travel once, later steps only name it. Typed, numbered and
versioned msgpack, no pickle, so that a recorded list of plans can be replayed. Followers hold no policy.
"""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 1

PlanKind = Literal["run", "drain"]


class NewSequence(msgspec.Struct, array_like=True, frozen=True):
    """A sequence that begins: its prompt, room in tokens for its keys and values, and how its tokens are chosen."""

    sequence: int
    prompt: list[int]
    capacity: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    logprobs: int


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one sequence in a step: `num_tokens` of them at positions from `start` on.

    token: the token fed where the prompt is behind (then num_tokens is 1), else -1. samples: whether the last token's
    logits choose the next token.
    """

    sequence: int
    start: int
    num_tokens: int
    token: int
    samples: bool


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """What every rank of a replica does next. `freed` sequences are forgotten before `new` ones begin.

    kind: "run" computes `chunks`; "drain" ends the run after all earlier steps.
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


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """The token chosen for a sequence, its log probability, and the likeliest tokens where they were asked for."""

    sequence: int
    token: int
    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """The samples of the step `number`, one for each chunk that samples, in the plan's order."""

    version: int
    number: int
    samples: list[Sample]


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
