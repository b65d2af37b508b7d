"""Run rings of tests in order and say at the end what became of each, and how those that failed ended.

    python -m tests.run [lint] [pure] [local] [mpi] [device] [--ranks 1 2 3 4] [-- PYTEST ARGUMENTS]

Promises: every ring that was asked for runs, whatever happened to the one before; the exit status is 1 if any of them
failed; nothing that was started outlives this program, interrupted or not. Refuses to know: what the tests test.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tests.launching import PROJECT, World, WorldTimeoutError

RINGS = ("lint", "pure", "local", "mpi", "device")
WORLD_SIZES = (1, 2, 3, 4)
NO_TESTS_COLLECTED = 5
# Of a failed step shown again below the summary, which is where the reader of a long log looks first.
SHOWN_LINES = 60


@dataclass(frozen=True)
class Step:
    """One command with a hard limit. `tests` is the folder a pytest step collects; None for a plain command."""

    title: str
    argv: tuple[str, ...]
    limit_s: float
    tests: Path | None = None
    num_ranks: int = 0


@dataclass
class Outcome:
    step: Step
    verdict: str
    wall_s: float
    counts: dict[str, int] = field(default_factory=dict)
    last_lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: Step, *, status: int, counts: dict[str, int] | None, wall_s: float, filtered: bool) -> Outcome:
        """`counts`: what pytest wrote at its end, None if it never got there; `filtered`: it had -k or the like."""
        # Every test of a world may be meant for other sizes, and a filter may leave nothing of a ring.
        if status == NO_TESTS_COLLECTED and (step.num_ranks or filtered):
            verdict = "no tests"
        elif status:
            verdict = f"exit status {status}"
        elif step.tests and counts is None:
            # A launcher may report 0 for a world that a rank left early.
            verdict = "ended without a report"
        else:
            verdict = "ok"
        return cls(step, verdict, wall_s, counts or {})

    @property
    def failed(self) -> bool:
        return self.verdict not in ("ok", "no tests")

    @property
    def num_passed(self) -> int:
        return sum(self.counts.get(name, 0) for name in ("passed", "xfailed", "xpassed"))

    @property
    def num_failed(self) -> int:
        """At least one where the step failed without a count: lint, a crash, a world that a failing rank ended."""
        counted = self.counts.get("failed", 0) + self.counts.get("error", 0)
        return max(counted, int(self.failed))

    @property
    def num_skipped(self) -> int:
        return self.counts.get("skipped", 0)


def main(arguments: Sequence[str]) -> int:
    options, pytest_arguments = parse(arguments)
    rings = [ring for ring in RINGS if ring in options.rings]
    steps = [step for ring in rings for step in steps_of(ring, options.ranks, pytest_arguments)]
    outcomes = []
    for step in steps:
        print(f"\n>>> {step.title}: {' '.join(shorten(part) for part in step.argv)}", flush=True)
        outcomes.append(run(step, filtered=bool(pytest_arguments)))
    print_summary(outcomes)
    return int(any(outcome.failed for outcome in outcomes))


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    own, pytest_arguments = list(arguments), []
    if "--" in own:
        split = own.index("--")
        own, pytest_arguments = own[:split], own[split + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rings", nargs="*", metavar="RING", help=f"of {', '.join(RINGS)}; all of them without a name")
    parser.add_argument("--ranks", nargs="+", type=int, default=WORLD_SIZES, help="world sizes of ring mpi")
    options = parser.parse_args(own)
    if unknown := set(options.rings) - set(RINGS):
        parser.error(f"no ring named {', '.join(sorted(unknown))}; there are {', '.join(RINGS)}")
    options.rings = options.rings or list(RINGS)
    return options, tuple(pytest_arguments)


def steps_of(ring: str, world_sizes: Sequence[int], pytest_arguments: tuple[str, ...]) -> list[Step]:
    python = sys.executable
    if ring == "lint":
        # lint-imports has no `python -m` form.
        imports = "import sys; from importlinter.cli import lint_imports_command as main; sys.exit(main())"
        return [
            Step("lint: ruff", (python, "-m", "ruff", "check", "."), 120),
            Step("lint: mypy strict", (python, "-m", "mypy"), 600),
            Step("lint: import contracts", (python, "-c", imports), 120),
        ]
    if ring == "mpi":
        inside = Path("tests/mpi/world")
        # The ranks of a world would write one cache folder at once.
        options = ("-p", "no:cacheprovider", *pytest_arguments)
        worlds = [
            Step(f"mpi: inside a world, ranks={size}", pytest(inside, options), 900, inside, num_ranks=size)
            for size in world_sizes
        ]
        launch = Path("tests/mpi/launch")
        return [*worlds, Step("mpi: worlds started by a test", pytest(launch, pytest_arguments), 1800, launch)]
    folder = Path("tests") / ring
    return [Step(ring, pytest(folder, pytest_arguments), 1800, folder)]


def pytest(folder: Path, pytest_arguments: Sequence[str]) -> tuple[str, ...]:
    color = "yes" if sys.stdout.isatty() else "no"
    return (sys.executable, "-m", "pytest", f"--color={color}", *pytest_arguments, str(folder))


def run(step: Step, *, filtered: bool) -> Outcome:
    if step.tests and not any((PROJECT / step.tests).rglob("test_*.py")):
        return Outcome(step, "no tests", 0.0)
    started = time.monotonic()
    status, counts = None, None
    with tempfile.TemporaryDirectory() as folder, Echo() as echo:
        totals = Path(folder) / "totals.json"
        argv = (*step.argv, f"--totals={totals}") if step.tests else step.argv
        with World(step.num_ranks, argv, output=echo.descriptor) as world, suppress(WorldTimeoutError):
            status = world.wait(step.limit_s).returncode
        if totals.exists():
            counts = json.loads(totals.read_text())
    wall_s = time.monotonic() - started
    if status is None:
        outcome = Outcome(step, f"killed after {step.limit_s:.0f} s", wall_s)
    else:
        outcome = Outcome.of(step, status=status, counts=counts, wall_s=wall_s, filtered=filtered)
    outcome.last_lines = echo.last_lines()
    return outcome


class Echo:
    """A descriptor whose text goes to standard output as it comes, and whose last lines are remembered."""

    def __init__(self) -> None:
        self._reading, self.descriptor = os.pipe()
        self._lines: deque[bytes] = deque(maxlen=SHOWN_LINES)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        rest = b""
        while text := os.read(self._reading, 1 << 16):
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
            *lines, rest = (rest + text).split(b"\n")
            self._lines.extend(lines)
        self._lines.append(rest)

    def last_lines(self) -> tuple[str, ...]:
        return tuple(line.decode(errors="replace") for line in self._lines if line.strip())

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        # The world is gone by now; whoever else holds the pipe is none of ours.
        self._thread.join(5)


def print_summary(outcomes: Sequence[Outcome]) -> None:
    print(f"\n{'':34}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}")
    for outcome in outcomes:
        numbers = (outcome.num_passed, outcome.num_failed, outcome.num_skipped)
        cells = "".join(f"{number:>8}" for number in numbers) if outcome.step.tests else f"{'':24}"
        print(f"{outcome.step.title:34}{cells}{outcome.wall_s:>9.1f}  {outcome.verdict}")
    passed, failed, skipped = (
        sum(numbers) for numbers in zip(*((o.num_passed, o.num_failed, o.num_skipped) for o in outcomes), strict=True)
    )
    for outcome in outcomes:
        if outcome.failed:
            print(f"\n--- how {outcome.step.title} ended", *outcome.last_lines, sep="\n")
    print(f"\ntotal: {passed} passed, {failed} failed, {skipped} skipped", flush=True)


def shorten(part: str) -> str:
    path = Path(part)
    return str(path.relative_to(PROJECT)) if path.is_absolute() and path.is_relative_to(PROJECT) else part


def stop(signum: int, _: object) -> NoReturn:
    raise SystemExit(128 + signum)  # unwinds through World, which kills what it started


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    sys.exit(main(sys.argv[1:]))
