"""What `doctor` concludes: every mistake of a launch is a sentence that says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpiinfer.cli.findings import DomainFacts, Finding, RankFacts, layout_findings, world_findings
from mpiinfer.comm.facts import HYDRA, NO_LAUNCHER, Launcher
from mpiinfer.layout.spec import Layout

RANK = RankFacts(
    rank=0,
    host="n1",
    node=0,
    local_rank=0,
    num_local=1,
    cores=frozenset(range(4)),
    num_threads=4,
    crowded=False,
    gpus=(),
    has_nvidia=False,
    torch_has_cuda=False,
    shared_memory_bytes=8 << 30,
    versions=(("torch", "2.13"), ("Python", "3.11")),
)
TWO = [replace(RANK, num_threads=2), replace(RANK, rank=1, local_rank=1, num_threads=2)]
LAUNCHER = Launcher(HYDRA, 2, "PMI_SIZE")


def sentences(findings: list[Finding], *levels: str) -> list[str]:
    return [sentence for level, sentence in findings if level in levels]


def complaint(ranks: list[RankFacts], launcher: Launcher = LAUNCHER, level: str = "warn", **changes: str) -> str:
    vendor, thread_level = changes.get("vendor", "MPICH"), changes.get("thread_level", "funneled")
    (sentence,) = sentences(world_findings(launcher, vendor, thread_level, ranks), level)
    return sentence


def test_a_good_launch_has_nothing_to_complain_of() -> None:
    findings = world_findings(LAUNCHER, "MPICH", "funneled", TWO)
    assert {finding.level for finding in findings} == {"ok"} and len(findings) == 4


def test_one_process_is_told_how_to_be_more() -> None:
    findings = world_findings(Launcher(NO_LAUNCHER), "MPICH", "funneled", [RANK])
    assert "mpiexec -n N" in findings[0].sentence and findings[0].level == "ok"


def test_another_number_of_ranks_fails() -> None:
    assert "meant 4 processes" in complaint(TWO, Launcher(HYDRA, 4, "PMI_SIZE"), "FAIL")


def test_a_slow_thread_level() -> None:
    assert "do not import mpi4py.MPI before" in complaint(TWO, thread_level="multiple")
    findings = world_findings(LAUNCHER, "Open MPI", "multiple", TWO)
    assert not sentences(findings, "warn", "FAIL")


def test_different_software_fails() -> None:
    ranks = [TWO[0], replace(TWO[1], host="n2", node=1, versions=(("torch", "2.12"), ("Python", "3.11")))]
    ranks = [replace(rank, num_threads=4) for rank in ranks]
    assert complaint(ranks, level="FAIL") == ("torch differs: 2.13 on n1, 2.12 on n2: use one environment on all hosts")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"crowded": True, "num_threads": 4}, "n1 runs 2 ranks with 8 threads in all on 4 cores"),
        ({"num_threads": 1}, "n1 uses 2 threads on 4 cores: unset OMP_NUM_THREADS"),
        ({"has_nvidia": True}, "install a CUDA build of torch"),
        ({"gpus": ("a",)}, "2 ranks that see 1 GPUs: start 1 ranks there"),
        ({"shared_memory_bytes": 64 << 20}, "n1 has 64 MiB free in /dev/shm for 2 ranks"),
    ],
)
def test_what_a_host_lacks(change: dict[str, object], said: str) -> None:
    assert said in complaint([replace(rank, **change) for rank in TWO])


def test_two_nodes_on_one_host() -> None:
    assert "2 nodes on host n1" in complaint([TWO[0], replace(TWO[1], node=1)])


def domain(name: str, *world_ranks: int, sums_right: bool = True) -> DomainFacts:
    return DomainFacts(name, world_ranks, "MPI", sums_right, 1.0, 1.0, 1.0)


def test_a_good_layout() -> None:
    findings = layout_findings(Layout(tensor=2), [domain("tp0.0", 0, 1)], (0, 0), "cpu", TWO)
    assert {finding.level for finding in findings} == {"ok"} and len(findings) == 4


def test_a_wrong_sum_fails() -> None:
    findings = layout_findings(Layout(tensor=2), [domain("tp0.0", 0, 1, sums_right=False)], (0, 0), "cpu", TWO)
    assert sentences(findings, "FAIL") == [
        "all-reduce gave a wrong sum in tp0.0: do not trust this MPI or NCCL here",
    ]


def test_shards_on_two_nodes() -> None:
    findings = layout_findings(Layout(tensor=2), [domain("tp0.0", 0, 1), domain("pp0.0", 0, 1)], (0, 1), "cpu", TWO)
    (sentence,) = sentences(findings, "warn")
    assert sentence.startswith("the shards of tp0.0 stand on different nodes")


def test_too_few_slots() -> None:
    findings = layout_findings(Layout(pipeline=2, slots=1), [domain("pp0.0", 0, 1)], (0, 0), "cpu", TWO)
    (sentence,) = sentences(findings, "warn")
    assert "set [pipeline] slots = 2 or more" in sentence


def test_gpus_that_are_not_used() -> None:
    ranks = [replace(rank, gpus=("a",)) for rank in TWO]
    findings = layout_findings(Layout(tensor=2), [domain("tp0.0", 0, 1)], (0, 0), "cpu", ranks)
    assert "computes on CPUs, because not every rank has a GPU of its own" in sentences(findings, "warn")
