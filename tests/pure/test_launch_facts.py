"""What the launcher meant, which ranks share a node, whose cores and GPUs are whose: rules without MPI."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiinfer.comm.facts import (
    HYDRA,
    NO_LAUNCHER,
    OPEN_MPI,
    SRUN,
    Launcher,
    assign_gpus,
    core_share,
    detect_launcher,
    number_nodes,
    singleton_complaint,
    startup_settings,
    wanted_threads,
)

# What a rank's environment holds under each way to start four ranks on two nodes.
IN_STEP = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
LAUNCHES = {
    "mpiexec of MPICH": ({"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4"}, Launcher(HYDRA, 4, "PMI_SIZE", 3)),
    "mpiexec of MPICH in an allocation": (
        # Slurm speaks of hydra's proxies here: one a node.
        {
            "PMI_SIZE": "4",
            "PMI_RANK": "2",
            "MPI_LOCALNRANKS": "2",
            **IN_STEP,
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "1",
        },
        Launcher(HYDRA, 4, "PMI_SIZE", 2),
    ),
    "mpiexec of Open MPI": (
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        Launcher(OPEN_MPI, 4, "OMPI_COMM_WORLD_SIZE", 1),
    ),
    "mpiexec of Open MPI in an allocation": (
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", **IN_STEP, "SLURM_STEP_NUM_TASKS": "1"},
        Launcher(OPEN_MPI, 4, "OMPI_COMM_WORLD_SIZE", 1),
    ),
    "srun pmi2": (
        {"PMI_SIZE": "4", "PMI_RANK": "3", **IN_STEP, "SLURM_STEP_NUM_TASKS": "4"},
        Launcher(SRUN, 4, "PMI_SIZE", 3),
    ),
    "srun pmix": (
        {"PMIX_RANK": "3", **IN_STEP, "SLURM_STEP_NUM_TASKS": "4"},
        Launcher(SRUN, 4, "SLURM_STEP_NUM_TASKS", 3),
    ),
    "srun none": ({**IN_STEP, "SLURM_STEP_NUM_TASKS": "4"}, Launcher(SRUN, 4, "SLURM_STEP_NUM_TASKS", 3)),
    "the batch script itself": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, Launcher(NO_LAUNCHER)),
    "a shell": ({}, Launcher(NO_LAUNCHER)),
    "nonsense": ({"PMI_SIZE": "many", "PMI_RANK": ""}, Launcher(NO_LAUNCHER)),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_detect_launcher(name: str) -> None:
    environ, expected = LAUNCHES[name]
    assert detect_launcher(environ) == expected


@pytest.mark.parametrize(
    ("launch", "vendor", "fix"),
    [
        ("srun none", "MPICH", "srun --mpi=pmi2"),
        ("srun none", "Open MPI", "srun --mpi=pmix"),
        ("srun pmi2", "Open MPI", "srun --mpi=pmix"),
        ("srun none", "Intel MPI", "srun --mpi=list"),
        ("mpiexec of MPICH", "Open MPI", "/env/bin/mpiexec"),
        ("mpiexec of Open MPI", "MPICH", "/env/bin/mpiexec"),
    ],
)
def test_singletons_are_told_the_fix(launch: str, vendor: str, fix: str) -> None:
    launcher = LAUNCHES[launch][1]
    complaint = singleton_complaint(launcher, 1, vendor, "/env/bin/mpiexec")
    assert complaint is not None and fix in complaint and "\n" not in complaint
    assert "4 processes" in complaint and str(launcher.size_from) in complaint


@pytest.mark.parametrize("launch", LAUNCHES)
def test_no_complaint_of_a_world(launch: str) -> None:
    assert singleton_complaint(LAUNCHES[launch][1], 4, "MPICH", "mpiexec") is None


@pytest.mark.parametrize(
    "launcher", [Launcher(NO_LAUNCHER), Launcher(HYDRA, 1, "PMI_SIZE"), Launcher(SRUN, 1, "PMI_SIZE")]
)
def test_no_complaint_of_one_process_that_was_meant(launcher: Launcher) -> None:
    assert singleton_complaint(launcher, 1, "MPICH", "mpiexec") is None


BOTH_NETWORKS = "MPICH Version: 5.0.2\nMPICH Device: ch4:ucx ofi\n"


@pytest.mark.parametrize("launch", LAUNCHES)
def test_mpich_under_srun_starts_on_its_network_with_short_addresses(launch: str) -> None:
    environ = LAUNCHES[launch][0]
    expected = {"MPIR_CVAR_CH4_NETMOD": "ofi"} if launch == "srun pmi2" else {}
    assert startup_settings(environ, BOTH_NETWORKS) == expected
    assert startup_settings({**environ, "MPIR_CVAR_CH4_NETMOD": "ucx"}, BOTH_NETWORKS) == {}
    for other in ("MPICH Version: 4.2\nMPICH Device: ch4:ucx\n", "Open MPI v5.0.11, built with ucx and ofi"):
        assert startup_settings(environ, other) == {}


def test_nodes_are_numbered_by_their_first_ranks() -> None:
    assert number_nodes([0, 0, 2, 2]) == (0, 0, 1, 1)
    assert number_nodes([0, 1, 0, 1, 4]) == (0, 1, 0, 1, 2)
    assert number_nodes([5]) == (0,)


def mask(*cores: int) -> frozenset[int]:
    return frozenset(cores)


@pytest.mark.parametrize(
    ("masks", "shares"),
    [
        ([mask(0, 1), mask(2, 3)], [2, 2]),  # bound by the launcher
        ([mask(*range(8))] * 4, [2, 2, 2, 2]),  # not bound
        ([mask(0, 1)] * 4, [Fraction(1, 2)] * 4),  # more ranks than cores
        ([mask(0)] * 4, [Fraction(1, 4)] * 4),  # srun --overcommit puts all on core 0
        ([mask(*range(6))] * 6, [1] * 6),  # thirds and sixths must add up
        ([mask(0, 1, 2), mask(0)], [Fraction(5, 2), Fraction(1, 2)]),
    ],
)
def test_core_share(masks: list[frozenset[int]], shares: list[Fraction]) -> None:
    assert [core_share(mine, masks) for mine in masks] == shares


@given(st.lists(st.frozensets(st.integers(0, 15), min_size=1), min_size=1, max_size=8))
def test_core_shares_add_up_to_the_cores(masks: list[frozenset[int]]) -> None:
    assert sum(core_share(mine, masks) for mine in masks) == len(frozenset().union(*masks))


@pytest.mark.parametrize(
    ("text", "threads"),
    [(None, None), ("", None), ("4", 4), ("4,2", 4), (" 3 ", 3), ("0", None), ("-1", None), ("all", None)],
)
def test_wanted_threads(text: str | None, threads: int | None) -> None:
    assert wanted_threads(text) == threads


@pytest.mark.parametrize(
    ("visible", "own"),
    [
        ([["a"], ["b"]], [0, 0]),  # --gpus-per-task=1: each sees its own as 0
        ([["a", "b"], ["a", "b"]], [0, 1]),  # --gpus-per-node=2: all see all
        ([["a"], ["a"]], [0, None]),  # one visible, but the same
        ([["a", "b", "c"]] * 2, [0, 1]),
        ([["a", "b"]] * 3, [0, 1, None]),
        ([[], []], [None, None]),
        ([["a"], []], [0, None]),
        ([["a", "b"], ["a"]], [1, 0]),  # the first gives way, or the second would have none
        ([["a", "b"], ["b", "c"], ["a"]], [1, 1, 0]),
        ([], []),
    ],
)
def test_assign_gpus(visible: list[list[str]], own: list[int | None]) -> None:
    assert assign_gpus(visible) == own


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True), max_size=6))
def test_no_gpu_is_given_twice(visible: list[list[str]]) -> None:
    own = assign_gpus(visible)
    given_out = [gpus[index] for gpus, index in zip(visible, own, strict=True) if index is not None]
    assert len(given_out) == len(set(given_out))
    without = [gpus for gpus, index in zip(visible, own, strict=True) if index is None]
    assert all(set(gpus) <= set(given_out) for gpus in without)
