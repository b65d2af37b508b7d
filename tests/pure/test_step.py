"""Plans and results survive the wire unchanged, and a rank of another version is noticed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiinfer.engine.sampling import Sampling
from mpiinfer.engine.step import (
    VERSION,
    Chunk,
    NewSequence,
    Sample,
    StepPlan,
    StepResult,
    decode_plan,
    decode_result,
    encode,
)

ids = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False)
samplings = st.builds(
    Sampling,
    temperature=floats,
    top_k=ids,
    top_p=floats,
    min_p=floats,
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.integers(-1, 20),
    repetition_penalty=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    bias=st.lists(st.tuples(ids, floats)),
    min_tokens=ids,
    endings=st.lists(ids),
    bad_words=st.lists(st.lists(ids)),
)
new_sequences = st.builds(NewSequence, ids, st.lists(ids), ids, st.lists(ids), samplings)
chunks = st.builds(Chunk, ids, ids, ids, st.integers(-1, 2**31 - 1), st.lists(ids), st.booleans())
plans = st.builds(
    StepPlan,
    st.just(VERSION),
    ids,
    st.sampled_from(["run", "rest", "drain"]),
    st.integers(0, 100),
    st.lists(ids),
    st.lists(new_sequences, max_size=3),
    st.lists(chunks),
)
samples = st.builds(Sample, ids, ids, floats, st.lists(ids), st.lists(floats))
results = st.builds(StepResult, st.just(VERSION), ids, st.lists(samples))


@given(plans)
def test_plans_round_trip(plan: StepPlan) -> None:
    assert decode_plan(encode(plan)) == plan


@given(results)
def test_results_round_trip(result: StepResult) -> None:
    assert decode_result(encode(result)) == result


def test_another_version_is_an_error() -> None:
    plan = StepPlan(VERSION + 1, 0, "run", 0, [], [], [])
    with pytest.raises(RuntimeError, match=f"version {VERSION + 1}"):
        decode_plan(encode(plan))


def test_what_is_no_plan_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_plan(b"\x01\x02")
