"""The verb `doctor`: facts of this launch, the domains of a layout with their timings, and checks that say what to do.

Collective: every rank tells its facts and takes part in the timings; the first rank prints, on standard output. The
conclusions are drawn in cli/findings. Measuring takes about two seconds at most.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from mpiinfer.cli.findings import (
    THREAD_LEVELS,
    DomainFacts,
    Finding,
    RankFacts,
    layout_findings,
    world_findings,
)
from mpiinfer.cli.report import plural
from mpiinfer.comm.device import DeviceDomain
from mpiinfer.comm.domain import Domain
from mpiinfer.comm.launch import World, choose_device, visible_gpus
from mpiinfer.errors import DomainError, MpiinferError
from mpiinfer.layout.grid import make_grid
from mpiinfer.layout.mesh import data_plane, open_mesh
from mpiinfer.layout.spec import Layout
from mpiinfer.pipeline.schedule import bubble_fraction, check, grid, ring

# A decode step's all-reduce of a small model, and a prefill's.
SMALL_BYTES, LARGE_BYTES, SEND_BYTES = 2_304, 1_126_400, 16_384
BUDGET_S = 0.1
SCHEDULE_ROUNDS = 3
PLAIN_WIDTH = 150


def doctor(world: World, layout: Layout) -> bool:
    """Print facts and checks; True when no check failed. Collective; every rank gets the same answer."""
    from mpi4py import MPI

    ranks: list[RankFacts] = world.domain.gather_object(_rank_facts(world))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    vendor, thread_level = MPI.get_vendor()[0], THREAD_LEVELS[_level_index(MPI.Query_thread())]
    findings: list[Finding] = []
    if world.domain.is_first:
        _print_launch(console, world, thread_level, ranks[0])
        _print_ranks(console, ranks)
        findings += world_findings(world.launcher, vendor, thread_level, ranks)
    try:
        domains, device = _open_and_measure(world, layout)
    except DomainError:
        raise
    except MpiinferError as error:  # the layout does not fit this world: the same on every rank
        findings.append(Finding("FAIL", str(error)))
    else:
        if world.domain.is_first:
            _print_layout(console, layout)
            _print_domains(console, domains)
            findings += layout_findings(layout, domains, world.nodes, device.type, ranks)
    if world.domain.is_first:
        _print_findings(console, findings)
        sys.stdout.flush()
    return world.domain.bcast_object(all(finding.level != "FAIL" for finding in findings))


# ---- facts


def _rank_facts(world: World) -> RankFacts:
    shared_memory = Path("/dev/shm")
    return RankFacts(
        rank=world.domain.rank,
        host=world.hosts[world.domain.rank],
        node=world.nodes[world.domain.rank],
        local_rank=world.local_rank,
        num_local=world.num_local,
        cores=frozenset(os.sched_getaffinity(0)),
        num_threads=torch.get_num_threads(),
        crowded=world.crowded,
        gpus=visible_gpus(),
        has_nvidia=Path("/dev/nvidiactl").exists(),
        torch_has_cuda=torch.version.cuda is not None,
        shared_memory_bytes=shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else None,
        versions=tuple(_versions().items()),
    )


def _versions() -> dict[str, str]:
    from mpi4py import MPI

    return {
        "mpiinfer": _version_of("mpiinfer"),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "mpi4py": _version_of("mpi4py"),
        "MPI library": " ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))]),
    }


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _level_index(level: int) -> int:
    from mpi4py import MPI

    return [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE].index(level)


# ---- measuring


def _open_and_measure(world: World, layout: Layout) -> tuple[list[DomainFacts], torch.device]:
    """The facts of all domains of the layout (on the first rank; elsewhere none), and the device of this rank."""
    device = choose_device(world, layout.device)
    open_plane = data_plane(layout.device, device, world.network)
    with open_mesh(world.domain, make_grid(layout, world.nodes), open_plane) as mesh:
        each_kind = (mesh.model, mesh.replica, mesh.heads, mesh.tp, mesh.pp)
        measured = [None if domain is None else _measure(domain) for domain in each_kind]
    gathered = world.domain.gather_object(measured)
    kinds = zip(*gathered, strict=True)
    return [facts for kind in kinds for facts in kind if facts is not None], device


def _measure(domain: Domain) -> DomainFacts | None:
    """Time a domain's verbs; the facts on its first rank, None elsewhere. Collective over the domain."""
    device = domain.device if isinstance(domain, DeviceDomain) else torch.device("cpu")
    total = domain.all_reduce(torch.ones(SMALL_BYTES // 4, device=device))
    right = domain.gather_object(bool((total == domain.size).all()))
    small, large, sent, received = (
        torch.zeros(num_bytes // 4, device=device) for num_bytes in (SMALL_BYTES, LARGE_BYTES, SEND_BYTES, SEND_BYTES)
    )

    def shift() -> None:
        incoming = domain.irecv(received, domain.prev)
        outgoing = domain.isend(sent, domain.next)
        incoming.wait()
        outgoing.wait()

    calls = (partial(domain.all_reduce, small), partial(domain.all_reduce, large), shift)
    times = [_median_us(domain, call) if domain.size > 1 else None for call in calls]
    if not domain.is_first:
        return None
    return DomainFacts(domain.name, domain.world_ranks, _plane(domain), all(right), *times)


def _median_us(domain: Domain, call: Callable[[], object]) -> float:
    """Median time of a collective call. The first rank says how many calls fit into the budget."""
    call()
    start = time.perf_counter()
    call()
    took_s = time.perf_counter() - start
    num_calls = domain.bcast_object(max(3, min(100, int(BUDGET_S / took_s))))
    times = []
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def _plane(domain: Domain) -> str:
    if isinstance(domain, DeviceDomain):
        return f"{domain.backend} on {domain.device}, store at {domain.address}"
    return "MPI" if domain.size > 1 else "alone"


# ---- printing


def _print_launch(console: Console, world: World, thread_level: str, first: RankFacts) -> None:
    from mpi4py import MPI

    from mpiinfer.comm.reduce import rules

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for software, version in first.versions:
        table.add_row(software, version)
    table.add_row("MPI standard", ".".join(map(str, MPI.Get_version())))
    table.add_row("thread level", thread_level)
    intended = f", meant {world.launcher.size} processes ({world.launcher.size_from})" if world.launcher.size else ""
    table.add_row("launcher", f"{world.launcher.name}{intended}")
    table.add_row("ranks", f"{world.domain.size} on {plural(max(world.nodes) + 1, 'node')}")
    table.add_row("interface", world.network.interface or "the one towards the other hosts (MPIINFER_INTERFACE)")
    table.add_row("sums over MPI", "; ".join(f"{dtype}: {rule}" for dtype, rule in rules().items()))
    console.print(table)
    console.print()


def _print_ranks(console: Console, ranks: Sequence[RankFacts]) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="ranks", title_justify="left")
    for column in ("rank", "host", "node", "local rank", "cores", "threads", "waits", "GPUs seen"):
        table.add_column(column)
    for rank in ranks:
        table.add_row(
            *(str(rank.rank), rank.host, str(rank.node), f"{rank.local_rank} of {rank.num_local}"),
            *(_ranges(rank.cores), str(rank.num_threads), "yield their core" if rank.crowded else "spin"),
            ", ".join(gpu.removeprefix("GPU-")[:8] for gpu in rank.gpus) or "none",
        )
    console.print(table)


def _ranges(cores: frozenset[int]) -> str:
    """Core numbers as ranges.

    >>> _ranges(frozenset({0, 1, 2, 5}))
    '0-2,5'
    """
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _print_layout(console: Console, layout: Layout) -> None:
    schedule = ring(layout.pipeline, layout.num_slots)
    check(schedule)
    idle = bubble_fraction(schedule, SCHEDULE_ROUNDS)
    console.print(f"layout: {layout}\nschedule: {SCHEDULE_ROUNDS} rounds, {idle:.0%} idle while it fills and drains")
    console.print(grid(schedule, SCHEDULE_ROUNDS), "\n", markup=False)


def _print_domains(console: Console, domains: Sequence[DomainFacts]) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="domains (medians in microseconds)", title_justify="left")
    for column in ("domain", "world ranks", "plane"):
        table.add_column(column)
    for column in ("all-reduce 2.25 KiB", "all-reduce 1.07 MiB", "send to next 16 KiB"):
        table.add_column(column, justify="right")
    for domain in domains:
        times = (domain.small_reduce_us, domain.large_reduce_us, domain.send_us)
        members = ", ".join(map(str, domain.world_ranks))
        table.add_row(domain.name, members, domain.plane, *("-" if us is None else f"{us:.1f}" for us in times))
    console.print(table)


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    console.print("checks (ok; warn: could run better; FAIL: does not run as asked)")
    for level, sentence in findings:
        console.print(f"  {level:4}  {sentence}", markup=False, soft_wrap=True)
