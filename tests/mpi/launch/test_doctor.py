"""`mpiinfer doctor`: facts, domains, timings and checks on standard output, from rank 0 only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import run_mpiinfer


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_without_a_layout(num_ranks: int) -> None:
    result = run_mpiinfer(num_ranks, "doctor", timeout_s=60)
    assert result.returncode == 0, result.shown()
    for word in ("MPI library", "thread level", "funneled", "launcher", "bfloat16", "spin", "tp0.0", "checks"):
        assert word in result.stdout, result.shown()
    assert "FAIL  " not in result.stdout and result.stdout.count("checks (") == 1, result.shown()
    size = max(1, num_ranks)
    assert re.search(rf"^ranks +{size} on 1 node\b", result.stdout, re.MULTILINE), result.shown()


def test_a_layout_shows_its_schedule_and_domains(tmp_path: Path) -> None:
    path = tmp_path / "layout.toml"
    path.write_text('[parallel]\ntensor = 2\npipeline = 2\n[comm]\ndevice = "gloo"\n')
    result = run_mpiinfer(4, "doctor", "--layout", str(path), timeout_s=90)
    assert result.returncode == 0, result.shown()
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "stage 0 F0 F1 F0 F1 F0 F1 .." in lines and "stage 1 .. F0 F1 F0 F1 F0 F1" in lines, result.shown()
    found = [line for line in lines if re.match(r"(model|replica|tp|pp)[\d.]* \d", line)]
    members = {line.split()[0]: re.findall(r"(?<= )\d(?=,? )", line)[:4] for line in found}
    assert list(members) == ["model", "replica0", "tp0.0", "tp0.1", "pp0.0", "pp0.1"], result.shown()
    assert found[2].startswith("tp0.0 0, 1 gloo on cpu, store at 127.0.0.1:"), result.shown()
    times = [float(cell) for line in found for cell in re.findall(r"\d+\.\d(?= |$)", line)[-3:]]
    assert len(times) == 18 and min(times) > 0, result.shown()


def test_a_layout_that_does_not_fit_fails_after_the_facts() -> None:
    result = run_mpiinfer(2, "doctor", "--tp", "3", timeout_s=60)
    assert result.returncode == 1, result.shown()
    assert "MPI library" in result.stdout and "FAIL  layout: tensor 3" in result.stdout, result.shown()


def test_gpus_that_are_not_there_fail(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    path = tmp_path / "layout.toml"
    path.write_text('[parallel]\ntensor = 2\n[comm]\ndevice = "nccl"\n')
    result = run_mpiinfer(2, "doctor", "--layout", str(path), timeout_s=60)
    assert result.returncode == 1, result.shown()
    assert 'FAIL  [comm] device = "nccl": on host' in result.stdout and "GPU" in result.stdout, result.shown()
