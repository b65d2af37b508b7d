"""Start a world of ranks from a test, see all that it printed, and be sure that nothing of it stays.

Promises: every world has a hard time limit; when it is over, or the test is, each process that it started is killed,
and no other process is touched. Refuses to know: pytest, mpi4py, and what the ranks run.

A launcher puts every rank into a session of its own, so killing the process group of `mpiexec` does not reach the
ranks. Each world therefore carries a unique mark in its environment, which all its descendants inherit, and is found
again by that mark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO

PROJECT = Path(__file__).resolve().parent.parent

# A world started from inside another one (the test runner's) carries both marks, hence a list in one variable.
MARK = "MPIINFER_TEST_WORLDS"
# What a launcher tells its ranks: a world started from inside another one must not take it for its own.
LAUNCHER_PREFIXES = (
    *("PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL"),
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_APP_", "OMPI_NUM_APP_", "OMPI_FIRST_RANKS"),
    *("OMPI_MCA_ess_", "OMPI_MCA_orte_", "OMPI_MCA_pmix_"),
)
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
SHARED_MEMORY = Path("/dev/shm")


class WorldTimeoutError(Exception):
    """A world outlived its limit and was killed; the message shows what it had printed until then."""


class WorldResult(subprocess.CompletedProcess[str]):
    """A finished world: `returncode`, `stdout`, `stderr`, `wall_s`, and `leftovers`.

    `leftovers` is one line for each process and shared-memory file of the world that was still there a moment after its
    launcher had ended; empty when it left cleanly.
    """

    def __init__(self, world: World, returncode: int, wall_s: float) -> None:
        super().__init__(world.argv, returncode, world.stdout(), world.stderr())
        self.wall_s = wall_s
        # Taken now: closing the world kills what is left.
        self.leftovers = world.leftovers()

    def shown(self) -> str:
        """All of it for an assertion's message."""
        return show(self.args, f"status {self.returncode} after {self.wall_s:.1f} s", self.stdout, self.stderr)


class World:
    """A running `mpiexec`. Leave it through `close()` (or as a context manager): that kills whatever still runs.

    `argv` is what each rank runs. `output` is a descriptor that both its outputs go to; without it they are kept.
    """

    def __init__(
        self,
        num_ranks: int,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str | None] | None = None,
        input: str | None = None,
        cwd: str | os.PathLike[str] = PROJECT,
        output: int | None = None,
        launcher_options: Sequence[str] = (),
    ) -> None:
        launcher = [*launcher_command(), *launcher_options, "-n", str(num_ranks)] if num_ranks else []
        self.argv = [*launcher, *(os.fspath(part) for part in argv)]
        self.mark = uuid.uuid4().hex
        self._files_before = shared_memory_files()
        self._stdin = self._spool(input)
        self._stdout = self._spool("") if output is None else None
        self._stderr = self._spool("") if output is None else None
        self._started = time.monotonic()
        try:
            self.process = subprocess.Popen(
                self.argv,
                stdin=self._stdin or subprocess.DEVNULL,
                stdout=self._stdout or output,
                stderr=self._stderr or output,
                cwd=cwd,
                env=world_environment(self.mark, env or {}),
                start_new_session=True,
            )
        except BaseException:
            self._close_spools()
            raise

    # Files, not pipes: an orphan that holds a pipe open would make the reader wait, and a file can be read any time.
    @staticmethod
    def _spool(text: str | None) -> IO[bytes] | None:
        if text is None:
            return None
        spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        spool.write(text.encode())
        spool.seek(0)
        return spool

    @staticmethod
    def _read(spool: IO[bytes] | None) -> str:
        if spool is None:
            return ""
        # `pread`, since the ranks write through the same file offset.
        return os.pread(spool.fileno(), os.fstat(spool.fileno()).st_size, 0).decode(errors="replace")

    def stdout(self) -> str:
        """Standard output of all ranks so far."""
        return self._read(self._stdout)

    def stderr(self) -> str:
        """Standard error of all ranks so far."""
        return self._read(self._stderr)

    def processes(self) -> dict[int, str]:
        """Every live process of this world by id, the launcher included, with its command line."""
        return dict(_marked_processes(self.mark))

    def rank_pid(self, rank: int, within_s: float = 20.0) -> int:
        """Process id of world rank `rank`, once it has been started; LookupError when it is not there in time."""
        return self.await_value(lambda: _pid_of_rank(self.mark, rank), within_s, f"rank {rank}")

    def await_output(self, text: str, within_s: float) -> None:
        """Return once `text` stands in what any rank printed; LookupError when it does not in time."""
        self.await_value(lambda: text in self.stdout() or text in self.stderr(), within_s, f"output {text!r}")

    def await_value(self, probe: Callable[[], int | bool | None], within_s: float, what: str) -> int:
        """First true answer of `probe`, asked ten times a second while the world runs."""
        until = time.monotonic() + within_s
        while True:
            over = self.process.poll() is not None or time.monotonic() > until
            if value := probe():
                return value
            if over:
                raise LookupError(show(self.argv, f"no {what} within {within_s} s", self.stdout(), self.stderr()))
            time.sleep(0.1)

    def wait(self, timeout_s: float) -> WorldResult:
        """Wait for the launcher's end; past `timeout_s` the world is killed and WorldTimeoutError raised."""
        try:
            returncode = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise WorldTimeoutError(
                show(self.argv, f"still running after {timeout_s} s, killed", self.stdout(), self.stderr())
            ) from None
        return WorldResult(self, returncode, time.monotonic() - self._started)

    def kill(self) -> None:
        """Kill the launcher's process group and each process with this world's mark; wait until they are gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        until = time.monotonic() + 10
        while (alive := self.processes()) and time.monotonic() < until:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def leftovers(self, within_s: float = 3.0) -> list[str]:
        """Live processes of this world and shared-memory files that appeared since its start and that nobody holds.

        Returns at once when there is nothing, else what is still there after a grace of `within_s`.

        A file that another program on this machine made meanwhile is mapped or open there, so it does not count.
        """
        until = time.monotonic() + within_s
        while True:
            left = [f"process {pid}: {command}" for pid, command in self.processes().items()]
            new = shared_memory_files() - self._files_before
            left += [f"file {path}" for path in sorted(new - files_held(new))]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.2)

    def close(self) -> None:
        """Kill what still runs and drop the kept output. Safe to call again."""
        self.kill()
        self._close_spools()

    def _close_spools(self) -> None:
        for spool in (self._stdin, self._stdout, self._stderr):
            if spool is not None:
                spool.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_world(
    num_ranks: int,
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout_s: float,
    env: Mapping[str, str | None] | None = None,
    input: str | None = None,
    cwd: str | os.PathLike[str] = PROJECT,
    launcher_options: Sequence[str] = (),
) -> WorldResult:
    """Run `mpiexec -n num_ranks argv` to its end and return status and outputs.

    `env` is laid over this process's environment (None removes a variable); OMP_NUM_THREADS is 1 unless given. `input`
    reaches rank 0's standard input. `num_ranks` 0 runs `argv` without a launcher. WorldTimeoutError after `timeout_s`.
    """
    with World(num_ranks, argv, env=env, input=input, cwd=cwd, launcher_options=launcher_options) as world:
        return world.wait(timeout_s)


def run_mpiinfer(num_ranks: int, *arguments: str, timeout_s: float, **options: object) -> WorldResult:
    """`run_world` of the program itself, with this interpreter."""
    return run_world(num_ranks, [sys.executable, "-m", "mpiinfer", *arguments], timeout_s=timeout_s, **options)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def launcher_command() -> tuple[str, ...]:
    """The `mpiexec` beside this interpreter, else the one on PATH, able to start more ranks than there are cores."""
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None:
        raise FileNotFoundError("no mpiexec beside this Python or on PATH; pip install 'mpiinfer[mpich]' brings one")
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=60).stdout
    if "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version:
        return (launcher, "--allow-run-as-root", "--oversubscribe")
    return (launcher,)


def world_environment(mark: str, changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment without an outer launcher's variables, one thread a rank, the mark, and `changes`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    environment["OMP_NUM_THREADS"] = "1"
    # Unbuffered, Python writes each argument of a print by itself, and the words of several ranks mix within a line.
    environment.pop("PYTHONUNBUFFERED", None)
    environment[MARK] = ":".join(filter(None, [os.environ.get(MARK), mark]))
    for key, value in changes.items():
        if value is None:
            environment.pop(key, None)
        else:
            environment[key] = value
    return environment


def shared_memory_files() -> set[Path]:
    """The files of /dev/shm now (none on a system without it)."""
    return set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()


def files_held(paths: set[Path]) -> set[Path]:
    """Those of `paths` that a live process has mapped or open (as far as this user may look)."""
    held: set[Path] = set()
    if not paths:
        return held
    for process in _process_folders():
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text(errors="replace")
            held.update(path for path in paths if str(path) in maps)
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.update(paths & {descriptor.readlink()})
    return held


def show(argv: Sequence[str], headline: str, stdout: str, stderr: str) -> str:
    """A world's command, fate and outputs as one readable text."""
    return f"{' '.join(argv)}\n{headline}\n--- standard output\n{stdout}\n--- standard error\n{stderr}\n---"


def _process_folders() -> Iterator[Path]:
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) != os.getpid():
            yield folder


def _marked_environments(mark: str) -> Iterator[tuple[Path, dict[str, str]]]:
    for folder in _process_folders():
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            raw = (folder / "environ").read_bytes()
            if mark.encode() not in raw:
                continue
            pairs = [entry.partition("=") for entry in raw.decode(errors="replace").split("\0")]
            environment = {key: value for key, _, value in pairs}
            if mark in environment.get(MARK, "").split(":"):
                yield folder, environment


def _marked_processes(mark: str) -> Iterator[tuple[int, str]]:
    for folder, _ in _marked_environments(mark):
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state not in "ZX":
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _pid_of_rank(mark: str, rank: int) -> int | None:
    """The oldest process that says it is `rank`: its own children inherit the variable, and come later."""
    found = [
        int(folder.name)
        for folder, environment in _marked_environments(mark)
        if str(rank) in [environment.get(name) for name in RANK_VARIABLES]
    ]
    return min(found, default=None)
