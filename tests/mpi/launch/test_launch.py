"""`launch`: worlds that are not what the launcher meant, and worlds that fail. Each is gone in seconds, traceless."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Sequence

import pytest

from tests.launching import World, WorldResult, run_world

PREAMBLE = """
import os, signal, sys, time
from mpiinfer.comm.launch import launch
assert "mpi4py.MPI" not in sys.modules, "MPI was started by an import"
world = launch(deadline_s={deadline_s})
import torch
domain = world.domain
"""


def script(body: str, *, deadline_s: float = 60) -> Sequence[str]:
    return [sys.executable, "-c", PREAMBLE.format(deadline_s=deadline_s) + textwrap.dedent(body)]


def run(num_ranks: int, body: str, *, deadline_s: float = 60, env: dict[str, str | None] | None = None) -> WorldResult:
    return run_world(num_ranks, script(body, deadline_s=deadline_s), timeout_s=60, env=env)


def error_lines(result: WorldResult) -> list[str]:
    return [line for line in result.stderr.splitlines() if "Error" in line]


@pytest.mark.parametrize("num_ranks", [0, 1, 3])
def test_a_world_that_ends_well(num_ranks: int) -> None:
    """0: no launcher at all."""
    body = """
        from mpi4py import MPI
        assert MPI.Query_thread() == MPI.THREAD_FUNNELED
        assert domain.all_reduce(torch.ones(3)).tolist() == [domain.size] * 3
        if domain.is_first:
            print(domain.size, world.local_rank, world.num_local, world.nodes, torch.get_num_threads())
        world.close()
    """
    result = run(num_ranks, body)
    size = max(1, num_ranks)
    assert result.returncode == 0, result.shown()
    assert result.stdout.strip() == f"{size} 0 {size} {(0,) * size} 1", result.shown()
    assert not result.leftovers, result.leftovers


def test_threads_are_the_share_of_the_cores() -> None:
    num_cores = len(os.sched_getaffinity(0))
    body = "print(torch.get_num_threads(), world.num_threads, world.crowded, flush=True); world.close()"
    alone = run(0, body, env={"OMP_NUM_THREADS": None})
    assert alone.stdout.split() == [str(num_cores), str(num_cores), "False"], alone.shown()
    asked = run(0, body, env={"OMP_NUM_THREADS": "3"})
    assert asked.stdout.split() == ["3", "3", str(num_cores < 3)], asked.shown()
    num_ranks = num_cores + 1
    if num_ranks <= 9:
        crowd = run(num_ranks, "print(world.num_threads, world.crowded); world.close()", env={"OMP_NUM_THREADS": None})
        assert sorted(crowd.stdout.split()) == ["1"] * num_ranks + ["True"] * num_ranks, crowd.shown()


SINGLETONS = {
    "srun --mpi=none": ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}, "srun --mpi=pm"),
    "an mpiexec that speaks PMI": ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "start it with"),
    "an mpiexec of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "3"}, "start it with"),
}


@pytest.mark.parametrize("launcher", SINGLETONS)
def test_singletons_stop_at_once_with_the_fix(launcher: str) -> None:
    env, fix = SINGLETONS[launcher]
    result = run(0, "print('went on')", env=dict(env))
    assert result.returncode == 1 and result.wall_s < 20, result.shown()
    assert "went on" not in result.stdout and "Traceback" not in result.stderr, result.shown()
    lines = error_lines(result)
    assert len(lines) == 1 and fix in lines[0] and "every process is alone" in lines[0], result.shown()


def test_one_process_in_an_allocation_is_no_error() -> None:
    env: dict[str, str | None] = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    result = run(0, "print(domain.size)", env=env)
    assert result.returncode == 0 and result.stdout.strip() == "1", result.shown()


def test_no_mpi_library_is_one_line() -> None:
    result = run(0, "", env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert result.returncode == 1, result.shown()
    assert "pip install mpich" in result.stderr and "LaunchError" in result.stderr, result.shown()


FAILURES = {
    "in a collective": "domain.all_reduce(torch.ones(4))",
    "in a receive": "domain.irecv(torch.ones(4), 1).wait()",
    "idle": "domain.irecv_message(1).wait(idle=True)",
    "in MPI itself": "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()",
}


@pytest.mark.parametrize("others", FAILURES)
def test_an_exception_that_nobody_catches_ends_all_ranks(others: str) -> None:
    result = run(3, f"if domain.rank == 1: raise ValueError('the cause')\n{FAILURES[others]}")
    assert result.returncode != 0 and result.wall_s < 15, result.shown()
    assert result.stderr.count("ValueError: the cause") == 1 and "[rank 1]" in result.stderr, result.shown()
    assert not result.leftovers, result.leftovers


def test_a_user_error_is_one_line() -> None:
    body = """
        from mpiinfer.errors import UsageError
        if domain.rank == 1: raise UsageError("--tp 0 means nothing")
        domain.barrier()
    """
    result = run(2, body)
    assert result.returncode != 0 and result.wall_s < 15, result.shown()
    assert "[rank 1] UsageError: --tp 0 means nothing\n" in result.stderr, result.shown()
    assert "Traceback" not in result.stderr, result.shown()


def test_a_posted_failure_lets_the_failing_rank_speak() -> None:
    """The others leave their wait at once, but do not end the job before the traceback is out."""
    body = """
        try:
            if domain.rank == 1: raise ValueError("the cause")
            domain.barrier()
        except ValueError as error:
            domain.waits.abort.post(str(error))
            time.sleep(1)
            raise
    """
    result = run(3, body)
    assert result.returncode != 0 and result.wall_s < 15, result.shown()
    assert "ValueError: the cause" in result.stderr and "Traceback" in result.stderr, result.shown()


def test_a_deadline_ends_the_job() -> None:
    body = "time.sleep(50) if domain.is_last else domain.all_reduce(torch.ones(4))"
    result = run(3, body, deadline_s=1)
    assert result.returncode != 0 and result.wall_s < 20, result.shown()
    assert "all_reduce waited 1.0 s, past the deadline of 1 s" in result.stderr, result.shown()
    assert not result.leftovers, result.leftovers


@pytest.mark.parametrize("where", ["computing", "waiting"])
def test_a_killed_rank_ends_the_job(where: str) -> None:
    victim = "time.sleep(50)" if where == "computing" else "domain.irecv_message(0).wait(idle=True)"
    body = f"""
        print("ready", domain.rank, flush=True)
        if domain.rank == 1: {victim}
        domain.irecv_message(1).wait(idle=True) if domain.is_first else domain.barrier()
    """
    with World(3, script(body)) as world:
        world.await_output("ready 1", 40)
        os.kill(world.rank_pid(1), signal.SIGKILL)
        result = world.wait(30)
    assert result.returncode != 0, result.shown()
    assert not result.leftovers, result.leftovers
