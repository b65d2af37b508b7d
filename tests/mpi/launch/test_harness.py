"""The harness itself: a world with one bad rank is red, says which rank and why, and is gone in seconds."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.launching import World, WorldResult, WorldTimeoutError, run_world
from tests.run import Outcome, Step, print_summary, run

GONE_WITHIN_S = 20.0

# A program of two statements that leaves no shared-memory file when it is killed.
FORGET = "from tests.mpi.world.conftest import WORLD, forget_shared_memory; forget_shared_memory()"

# Every case leaves the other rank waiting in a barrier: without the harness each of these would hang.
BODIES = {
    "assert": "assert WORLD.rank == 0, 'rank one disagrees'",
    "raise": "if WORLD.rank == 1:\n        raise RuntimeError('rank one gave up')",
    "system_exit": "if WORLD.rank == 1:\n        raise SystemExit(0)",
    "keyboard_interrupt": "if WORLD.rank == 1:\n        raise KeyboardInterrupt",
    "sigkill": "if WORLD.rank == 1:\n        os.kill(os.getpid(), 9)",
    "vanish": "if WORLD.rank == 1:\n        os._exit(0)",
    "hang": "if WORLD.rank == 1:\n        time.sleep(3600)",
}


def inner_file(folder: Path, body: str, head: str = "", tail: str = "") -> Path:
    path = folder / "test_inner.py"
    path.write_text(
        f"import os, sys, time\nimport pytest\nfrom mpi4py import MPI\nWORLD = MPI.COMM_WORLD\n{head}\n"
        f"def test_inner():\n    {body}\n    WORLD.Barrier()\n{tail}\n"
    )
    return path


def run_inner(path: Path, *options: str, num_ranks: int = 2, timeout_s: float = GONE_WITHIN_S) -> WorldResult:
    """A run of pytest on `path` in a world of its own, with the plugin that tests/mpi/world uses."""
    plugins = ("-p", "tests.mpi.world.conftest", "-p", "no:cacheprovider")
    outside = (f"--rootdir={path.parent}", "-c", os.devnull, "--color=no")
    argv = (sys.executable, "-m", "pytest", *plugins, *outside, *options, path)
    return run_world(num_ranks, argv, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("assert", "rank one disagrees"),
        ("raise", "rank one gave up"),
        ("system_exit", "SystemExit"),
        ("keyboard_interrupt", "KeyboardInterrupt"),
    ],
)
def test_a_rank_that_fails_ends_the_world_and_says_why(tmp_path: Path, case: str, said: str) -> None:
    result = run_inner(inner_file(tmp_path, BODIES[case]))
    assert result.returncode != 0, result.shown()

    assert "[rank 1 of 2]" in result.stderr, result.shown()
    assert said in result.stderr, result.shown()
    assert "[rank 0 of 2]" not in result.stderr, result.shown()
    assert not result.leftovers, result.shown()


def test_a_rank_that_is_killed_ends_the_world(tmp_path: Path) -> None:
    result = run_inner(inner_file(tmp_path, BODIES["sigkill"]))
    assert result.returncode != 0, result.shown()

    assert not result.leftovers, result.leftovers


def test_a_rank_that_vanishes_with_status_0_is_still_red(tmp_path: Path) -> None:
    # MPICH's launcher kills the others then, but may call it a success. No report, no success.
    result = run_inner(inner_file(tmp_path, BODIES["vanish"]))
    assert "passed" not in result.stdout, result.shown()
    assert not result.leftovers, result.leftovers
    step = Step("world", (), 1.0, tests=Path("tests/mpi/world"), num_ranks=2)
    assert Outcome.of(step, status=0, counts=None, wall_s=1.0, filtered=False).failed


def test_a_rank_that_hangs_ends_at_the_tests_limit(tmp_path: Path) -> None:
    result = run_inner(inner_file(tmp_path, BODIES["hang"]), "--timeout=3")
    assert result.returncode != 0, result.shown()

    for rank, line in enumerate(["WORLD.Barrier()", "time.sleep(3600)"]):
        said = rf"rank {rank} of 2\] .*test_inner still runs after 3.0 s(.|\n)*{re.escape(line)}"
        assert re.search(said, result.stderr), result.shown()
    assert not result.leftovers, result.leftovers


@pytest.mark.parametrize(
    ("head", "tail", "said"),
    [
        ("assert WORLD.rank == 0, 'broken import'", "", "broken import"),
        (
            "@pytest.fixture(autouse=True)\ndef room():\n    assert WORLD.rank == 0, 'broken setup'\n    yield\n",
            "",
            "broken setup",
        ),
        (
            "@pytest.fixture(autouse=True)\ndef room():\n    yield\n    assert WORLD.rank == 0, 'broken teardown'\n",
            "def test_after():\n    WORLD.Barrier()",
            "broken teardown",
        ),
    ],
    ids=["collection", "setup", "teardown"],
)
def test_each_phase_counts(tmp_path: Path, head: str, tail: str, said: str) -> None:
    result = run_inner(inner_file(tmp_path, "pass", head, tail))
    assert result.returncode != 0, result.shown()

    assert "[rank 1 of 2]" in result.stderr, result.shown()
    assert said in result.stderr, result.shown()
    assert not result.leftovers, result.leftovers


def test_a_sound_world_reports_once_and_leaves_nothing(tmp_path: Path) -> None:
    result = run_inner(inner_file(tmp_path, "print('said by', WORLD.rank)"), "-s", num_ranks=3)
    assert result.returncode == 0, result.shown()
    assert re.findall(r"\d+ passed", result.stdout) == ["1 passed"], result.shown()
    assert re.search(r"^MPI: .+, 3 ranks$", result.stdout, re.MULTILINE), result.shown()
    assert result.stderr == "", result.shown()
    assert not result.leftovers, result.shown()


def test_tests_for_other_sizes_are_left_out(tmp_path: Path) -> None:
    tail = (
        "@pytest.mark.ranks(3)\ndef test_three(): assert False\n"
        "@pytest.mark.ranks(at_least=3)\ndef test_many(): assert False\n"
        "@pytest.mark.ranks(1, 2)\ndef test_few(): WORLD.Barrier()\n"
    )
    result = run_inner(inner_file(tmp_path, "pass", tail=tail))
    assert result.returncode == 0, result.shown()
    assert "2 passed, 2 deselected" in result.stdout, result.shown()


def test_a_world_past_its_limit_is_killed_with_its_output_shown() -> None:
    program = f"{FORGET}; import time; print('alive', flush=True); time.sleep(3600)"
    with World(2, [sys.executable, "-c", program]) as world:
        world.await_output("alive", within_s=GONE_WITHIN_S)
        assert len([line for line in world.processes().values() if program in line]) >= 2
        with pytest.raises(WorldTimeoutError, match=r"still running after 0.5 s(.|\n)*alive"):
            world.wait(0.5)
        assert not world.processes()


def test_a_rank_can_be_found_and_killed() -> None:
    program = f"{FORGET}; import time; print('up', WORLD.rank, flush=True); time.sleep(3600)"
    with World(2, [sys.executable, "-c", program]) as world:
        world.await_output("up 1", within_s=GONE_WITHIN_S)
        os.kill(world.rank_pid(1), signal.SIGKILL)
        result = world.wait(GONE_WITHIN_S)
    assert result.returncode != 0, result.shown()
    assert not result.leftovers, result.leftovers


def test_a_failed_step_shows_its_end_again(capfd: pytest.CaptureFixture[str]) -> None:
    """The reader of a long log looks at its end first."""
    program = "print(*(f'line {n}' for n in range(500)), sep='\\n', flush=True); raise SystemExit('what went wrong')"
    outcomes = [run(Step("broken", (sys.executable, "-c", program), 60), filtered=False)]
    assert capfd.readouterr().out.count("what went wrong") == 1
    print_summary(outcomes)
    shown = capfd.readouterr().out
    assert "what went wrong" in shown and "line 499" in shown and "line 400\n" not in shown
    assert shown.rstrip().endswith("total: 0 passed, 1 failed, 0 skipped")


def test_a_step_past_its_limit_shows_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import time; print('started', flush=True); time.sleep(3600)"
    print_summary([run(Step("stuck", (sys.executable, "-c", program), 2), filtered=False)])
    shown = capfd.readouterr().out
    assert "killed after 2 s" in shown and shown.count("started") == 2
