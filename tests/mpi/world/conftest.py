"""Tests that run inside a world: `mpiexec -n N python -m pytest tests/mpi/world`, the same tests on every rank.

Promises: rank 0 alone prints the report; a test that fails, errors or runs out of time on any rank ends the whole world
within a second or two, after that rank has printed what failed (without this the others would wait in MPI for ever); a
world that ends this way leaves no shared-memory file.

A test says for which worlds it is meant: `@pytest.mark.ranks(2, 4)` (these sizes), `@pytest.mark.ranks(at_least=2)`;
without the mark it runs in each. All ranks must run the same tests in the same order: never skip by rank.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mpi4py
import pytest

# As the program itself starts MPI; mpi4py would ask for "multiple".
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI  # noqa: E402

WORLD = MPI.COMM_WORLD


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes, at_least=1): run in worlds of these sizes or of at least so many")
    if WORLD.size > 1:
        forget_shared_memory()
        config.pluginmanager.register(OneFailsAllEnd(os.dup(2)))
    if WORLD.rank > 0:
        config.option.totals = None
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 (the terminal reporter, made next, keeps it to the end)


def pytest_report_header() -> str:
    vendor, version = MPI.get_vendor()
    return f"MPI: {vendor} {'.'.join(map(str, version))}, {WORLD.size} ranks"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if not wants_this_world(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def wants_this_world(item: pytest.Item) -> bool:
    for mark in item.iter_markers("ranks"):
        if (mark.args and WORLD.size not in mark.args) or WORLD.size < mark.kwargs.get("at_least", 1):
            return False
    return True


def forget_shared_memory() -> None:
    """Remove the name of MPICH's shared-memory segment, which every rank of this node has mapped by now.

    MPICH itself removes it in MPI_Finalize only, so an aborted or killed world would leave it behind.
    """
    node = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    node.Barrier()
    if node.rank == 0 and (maps := Path("/proc/self/maps")).exists():
        for name in set(re.findall(r"/dev/shm/mpich_shm_\w+", maps.read_text())):
            Path(name).unlink(missing_ok=True)
    node.Free()


class OneFailsAllEnd:
    """The hooks that end a world of several ranks when one of them stops short.

    `stderr` is a descriptor of the real standard error: while a test runs, pytest has put a file in place of number 2.
    """

    def __init__(self, stderr: int) -> None:
        self.stderr = stderr
        self.watchdog: threading.Timer | None = None

    def say(self, cause: str) -> None:
        """One write, so that the texts of several ranks do not mix within a line."""
        os.write(self.stderr, f"\n[rank {WORLD.rank} of {WORLD.size}] {cause.rstrip()}\n".encode(errors="replace"))

    def end_world(self, cause: str) -> None:
        self.say(cause)
        time.sleep(0.2)  # the launcher forwards the text before it hears of the abort
        WORLD.Abort(1)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            printed = "".join(f"\n--- {title}\n{content}" for title, content in report.sections if content.strip())
            self.end_world(f"{item.nodeid} failed in its {report.when} phase\n{report.longreprtext}{printed}")
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.end_world(f"{report.nodeid} could not be collected\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self.end_world(f"pytest itself failed\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.end_world("".join(traceback.format_exception(excinfo.value)))

    # Instead of pytest-timeout's own clocks: a Python signal handler does not run while the main thread waits in MPI,
    # and its thread would end the world after the stack of one rank only.

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        self.watchdog = threading.Timer(settings.timeout, self.out_of_time, [item.nodeid, settings.timeout])
        self.watchdog.daemon = True
        self.watchdog.start()
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        if self.watchdog is not None:
            self.watchdog.cancel()
        return True

    def out_of_time(self, nodeid: str, limit_s: float) -> None:
        frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
        own = [frame for frame in frames if "/_pytest/" not in frame.filename and "/pluggy/" not in frame.filename]
        self.say(f"{nodeid} still runs after {limit_s} s; the main thread is at\n{''.join(traceback.format_list(own))}")
        time.sleep(1.0)  # for the other ranks to say the same
        os._exit(1)


@pytest.fixture
def world() -> MPI.Intracomm:
    """The world's communicator."""
    return WORLD


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    """One temporary folder for all ranks: rank 0's."""
    return WORLD.bcast(tmp_path)
