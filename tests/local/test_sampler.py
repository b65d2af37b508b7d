"""Sampling: the same token from any cut of the vocabulary, whatever the neighbours, and from the right distribution."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from mpiinfer.comm.domain import Domain
from mpiinfer.comm.local import run_local
from mpiinfer.engine.sampler import Chosen, Row, Sampler, gumbel, noise_stream
from mpiinfer.engine.sampling import Sampling
from mpiinfer.model.shard import columns_range

VOCABULARY = 1003


def _choice(position: int = 0, **fields: Any) -> Row:
    """A row after `position` tokens."""
    return Row(Sampling(**fields), [0] * position, position)


def _sample(logits: torch.Tensor, choices: list[Row], num_shards: int = 1) -> list[list[Chosen]]:
    """Each shard's answer."""
    vocab_size = logits.shape[1]

    def work(tp: Domain) -> list[Chosen]:
        rows = columns_range(vocab_size, tp.rank, tp.size)
        return Sampler(rows, vocab_size, tp)(logits[:, rows.start : rows.stop].clone(), choices)

    return run_local(num_shards, work)


def _logits(num_rows: int, seed: int = 0, width: int = VOCABULARY) -> torch.Tensor:
    return torch.randn((num_rows, width), generator=torch.Generator().manual_seed(seed)) * 3


CHOICES = [
    _choice(),
    _choice(logprobs=5),
    _choice(temperature=0.7, seed=1, position=9, logprobs=0),
    _choice(temperature=1.0, seed=2, top_k=5),
    _choice(temperature=1.3, seed=3, top_p=0.8, logprobs=3),
    _choice(temperature=1.0, seed=4, top_k=50, top_p=0.5),
    _choice(temperature=50.0, seed=5, top_p=0.999),  # flat: the nucleus is wider than the first candidates
    _choice(temperature=2.0, seed=6),
]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_every_cut_of_the_vocabulary_chooses_the_same(num_shards: int) -> None:
    logits = _logits(len(CHOICES))
    whole = _sample(logits, CHOICES)[0]
    for answer in _sample(logits, CHOICES, num_shards):
        assert [chosen.token for chosen in answer] == [chosen.token for chosen in whole]
        assert [chosen.top_tokens for chosen in answer] == [chosen.top_tokens for chosen in whole]
        for mine, theirs in zip(answer, whole, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9, nan_ok=True)
            assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-9)


def test_neighbours_do_not_matter() -> None:
    logits = _logits(len(CHOICES))
    together = _sample(logits, CHOICES)[0]
    for row, choice in enumerate(CHOICES):
        alone = _sample(logits[row : row + 1], [choice])[0][0]
        assert alone.token == together[row].token


def test_logprobs_are_those_of_the_model() -> None:
    logits = _logits(2)
    expected = torch.log_softmax(logits.double(), dim=1)
    choices = [_choice(temperature=3.0, seed=7, logprobs=4), _choice(logprobs=1)]
    for row, chosen in enumerate(_sample(logits, choices)[0]):
        assert chosen.logprob == pytest.approx(float(expected[row, chosen.token]), abs=1e-9)
        best = expected[row].topk(choices[row].sampling.logprobs)
        assert chosen.top_tokens == best.indices.tolist()
        assert chosen.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-9)


def test_without_logprobs_there_are_none() -> None:
    chosen = _sample(_logits(1), [_choice()])[0][0]
    assert math.isnan(chosen.logprob) and chosen.top_tokens == []


@pytest.mark.parametrize("num_shards", [1, 3])
def test_greedy_takes_the_first_of_equals(num_shards: int) -> None:
    logits = torch.zeros((1, 96))
    logits[0, [7, 50, 90]] = 1.0
    assert _sample(logits, [_choice()], num_shards)[0][0].token == 7


def _distribution(choice_fields: dict[str, float], logits_V: torch.Tensor, count: int = 4000) -> Counter[int]:
    choices = [_choice(**choice_fields, seed=seed) for seed in range(count)]
    return Counter(chosen.token for chosen in _sample(logits_V.expand(count, -1), choices)[0])


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def _close(counts: Counter[int], probabilities: torch.Tensor, count: int = 4000) -> None:
    """Within five standard deviations of a binomial."""
    for token, probability in enumerate(probabilities.tolist()):
        spread = 5 * math.sqrt(count * probability * (1 - probability))
        assert abs(counts[token] - count * probability) <= spread, (token, counts[token], count * probability)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_softmax(temperature: float) -> None:
    _close(_distribution({"temperature": temperature}, LOGITS), torch.softmax(LOGITS / temperature, 0))


def test_top_k_keeps_k_tokens() -> None:
    expected = torch.zeros(6)
    expected[:3] = torch.softmax(LOGITS[:3], 0)
    _close(_distribution({"temperature": 1.0, "top_k": 3}, LOGITS), expected)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Probabilities are 0.57, 0.21, 0.13, ...: 0.6 needs two tokens."""
    expected = torch.zeros(6)
    expected[:2] = torch.softmax(LOGITS[:2], 0)
    _close(_distribution({"temperature": 1.0, "top_p": 0.6}, LOGITS), expected)


def test_top_p_counts_within_top_k() -> None:
    """Of two tokens the first has 0.73: enough for 0.7, while of all tokens it has only 0.57."""
    counts = _distribution({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, LOGITS, count=50)
    assert set(counts) == {0}


def test_gumbel_noise_is_gumbel() -> None:
    noise = torch.cat([gumbel(noise_stream(seed, 3), torch.arange(5000)) for seed in range(20)])
    assert bool(torch.isfinite(noise).all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)


def test_gumbel_noise_is_a_function_of_seed_position_and_token() -> None:
    ids = torch.arange(100)
    assert torch.equal(gumbel(noise_stream(1, 2), ids)[40:60], gumbel(noise_stream(1, 2), ids[40:60]))
    assert not torch.equal(gumbel(noise_stream(1, 2), ids), gumbel(noise_stream(1, 3), ids))
    assert not torch.equal(gumbel(noise_stream(1, 2), ids), gumbel(noise_stream(2, 2), ids))
    assert not torch.equal(gumbel(noise_stream(1, 2), ids), gumbel(noise_stream(2, 1), ids))
    correlation = torch.corrcoef(
        torch.stack([gumbel(noise_stream(1, 2), torch.arange(5000)), gumbel(noise_stream(1, 3), torch.arange(5000))])
    )
    assert abs(float(correlation[0, 1])) < 0.06
