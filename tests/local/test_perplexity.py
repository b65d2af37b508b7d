"""What formats do to the packaged model, on a text that ships with the tests."""

from __future__ import annotations

import pytest

from benchmarks.perplexity import perplexity, stage_of, token_ids_of
from mpiinfer.weights.checkpoint import Checkpoint, open_checkpoint
from mpiinfer.weights.source import resolve_model


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def exact(checkpoint: Checkpoint) -> float:
    return perplexity(stage_of(checkpoint, "exact"), token_ids_of(checkpoint))


@pytest.mark.parametrize("weights", ["fp16", "bf16", "int8", "native", "auto"])
def test_within_one_percent_of_exact(checkpoint: Checkpoint, exact: float, weights: str) -> None:
    assert perplexity(stage_of(checkpoint, weights), token_ids_of(checkpoint)) < 1.01 * exact


def test_four_bits_are_four_bits(checkpoint: Checkpoint, exact: float) -> None:
    """The head is rounded a second time, from 8 bits: worse than exact, and still the same model."""
    found = perplexity(stage_of(checkpoint, "int4"), token_ids_of(checkpoint))
    assert 1.01 * exact < found < 1.2 * exact


def test_a_files_blocks_are_taken_as_they_are(checkpoint: Checkpoint) -> None:
    """Decoded from the blocks that are held, every weight is that of the fp32 form."""
    native, exact = stage_of(checkpoint, "native"), stage_of(checkpoint, "exact")
    assert native.weight_formats == "int4+int8"
    for name, weight in native.weights.items():
        assert weight.tensor().allclose(exact.weights[name].tensor(), rtol=1e-6, atol=1e-7), name
