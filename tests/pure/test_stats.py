"""Fractions and percentiles of a run, worked out by hand."""

from __future__ import annotations

import pytest

from mpiinfer.engine.stats import RankTimes, RequestTimes, RunStats, percentile


def test_fractions() -> None:
    head = RankTimes(wall_s=10.0, forward_s=6.0, tensor_s=1.0, wait_s=3.0)
    other = RankTimes(wall_s=10.0, forward_s=5.0, tensor_s=2.0, wait_s=4.0)
    stats = RunStats((head, other), ())
    assert stats.wall_s == 10.0
    assert stats.bubble_fraction == pytest.approx(0.35)
    assert stats.comm_fraction == pytest.approx(0.15)
    assert stats.step_overhead_fraction == pytest.approx(0.1)


def test_a_run_of_nothing_costs_nothing() -> None:
    stats = RunStats((RankTimes(0.0, 0.0, 0.0, 0.0),), ())
    assert (stats.bubble_fraction, stats.comm_fraction, stats.step_overhead_fraction) == (0.0, 0.0, 0.0)


def test_time_per_token_counts_the_gaps() -> None:
    assert RequestTimes(num_tokens=5, first_token_s=1.0, last_token_s=3.0).per_token_s == 0.5
    assert RequestTimes(num_tokens=1, first_token_s=1.0, last_token_s=1.0).per_token_s is None


def test_percentiles() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 0.5) == 51.0
    assert percentile(values, 0.99) == 100.0
    assert percentile([3.0], 0.5) == percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) == 0.0
