"""What all rings share: one thread a process by default, and totals for the runner.

Promises: nothing here imports torch or mpi4py, so the pure ring needs neither.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

# Thread domains and worlds put several ranks on one core; OpenMP threads on top of them wait for each other by
# spinning. It must stand before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--totals", metavar="FILE", help="write the counts of the run to FILE as JSON (for tests/run.py)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if path := config.getoption("totals"):
        stats = terminalreporter.stats
        Path(path).write_text(json.dumps({outcome: len(stats.get(outcome, [])) for outcome in OUTCOMES}))
