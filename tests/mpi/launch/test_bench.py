"""`mpiinfer bench` ends with one JSON line whose figures hang together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_mpiinfer
from tests.models import tiny_model

KEYS = {
    *("output_tokens_per_s", "total_tokens_per_s", "ttft_s", "tpot_s", "wall_s", "step_overhead_fraction"),
    *("bubble_fraction", "comm_fraction", "weights", "layout", "peak_rss_bytes"),
}


@pytest.mark.parametrize("layout", ["--tp", "--pp", "--dp"])
def test_json_is_the_last_line_and_adds_up(tmp_path: Path, layout: str) -> None:
    folder = tiny_model(tmp_path / "tiny", "llama")
    arguments = ("--requests", "10", "--input-tokens", "7", "--output-tokens", "9", "--concurrency", "4")
    result = run_mpiinfer(
        2, "bench", "--model", str(folder), layout, "2", *arguments, "--weights", "bf16", "--json", timeout_s=60
    )
    assert result.returncode == 0, result.shown()
    record = json.loads(result.stdout.splitlines()[-1])
    assert record.keys() == KEYS
    assert record["output_tokens_per_s"] * record["wall_s"] == pytest.approx(10 * 9)
    assert record["total_tokens_per_s"] * record["wall_s"] == pytest.approx(10 * (7 + 9))
    assert 0 < record["ttft_s"]["p50"] <= record["ttft_s"]["p99"] <= record["wall_s"]
    assert 0 < record["tpot_s"]["p50"] <= record["tpot_s"]["p99"] <= record["wall_s"]
    for fraction in ("step_overhead_fraction", "bubble_fraction", "comm_fraction"):
        assert 0 <= record[fraction] <= 1
    assert record["weights"] == "bf16" and len(record["peak_rss_bytes"]) == 2
    words = {"--tp": "tensor=2", "--pp": "pipeline=2", "--dp": "replicas=2"}
    assert words[layout] in record["layout"]
