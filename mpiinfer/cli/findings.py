"""What `doctor` concludes from the facts of all ranks: each check is fine, or a sentence that says what to do.

Pure rules over values that `doctor` collects; nothing here asks MPI, torch or the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mpiinfer.comm.facts import Launcher
from mpiinfer.layout.spec import Layout

MIN_SHARED_MEMORY_BYTES = 64 << 20
THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")


class Finding(NamedTuple):
    """ok: nothing to do. warn: it runs, but not as well as it could. FAIL: it does not run as asked."""

    level: Literal["ok", "warn", "FAIL"]
    sentence: str


@dataclass(frozen=True)
class RankFacts:
    """What one rank says of itself. gpus: ids of those that it sees. versions: of the software that must agree.

    has_nvidia: the host has an NVIDIA driver. shared_memory_bytes: free in /dev/shm, None where there is none.
    """

    rank: int
    host: str
    node: int
    local_rank: int
    num_local: int
    cores: frozenset[int]
    num_threads: int
    crowded: bool
    gpus: tuple[str, ...]
    has_nvidia: bool
    torch_has_cuda: bool
    shared_memory_bytes: int | None
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class DomainFacts:
    """One domain as its first rank saw it. Times are medians in microseconds, None in a domain of one rank."""

    name: str
    world_ranks: tuple[int, ...]
    plane: str
    sums_right: bool
    small_reduce_us: float | None
    large_reduce_us: float | None
    send_us: float | None


def world_findings(launcher: Launcher, vendor: str, thread_level: str, ranks: Sequence[RankFacts]) -> list[Finding]:
    """Checks of the launch."""
    return [
        _launch(launcher, len(ranks)),
        _thread_level(vendor, thread_level),
        *_versions(ranks),
        *_nodes(ranks),
        *_cores(ranks),
        *_gpus(ranks),
    ]


def layout_findings(
    layout: Layout, domains: Sequence[DomainFacts], nodes: Sequence[int], device: str, ranks: Sequence[RankFacts]
) -> list[Finding]:
    """Checks of a layout whose domains were opened; `nodes[r]` is the node of world rank r."""
    return [*_sums(domains), *_shards_on_one_node(domains, nodes), _slots(layout), _device(layout, device, ranks)]


def _launch(launcher: Launcher, size: int) -> Finding:
    if launcher.size is None:
        return Finding("ok", "started without a launcher, as 1 rank: `mpiexec -n N mpiinfer ...` starts more")
    if launcher.size != size:
        return Finding(
            "FAIL",
            f"{launcher.name} meant {launcher.size} processes ({launcher.size_from}), MPI found {size} ranks: start "
            "with the mpiexec that belongs to the MPI library above",
        )
    return Finding("ok", f"{launcher.name} meant {launcher.size} processes, and MPI found as many ranks")


def _thread_level(vendor: str, thread_level: str) -> Finding:
    if vendor == "MPICH" and thread_level == "multiple":
        return Finding(
            "warn",
            "MPICH runs at thread level multiple, where small blocking calls are several times slower: do not import "
            "mpi4py.MPI before mpiinfer starts it",
        )
    return Finding("ok", f"thread level {thread_level} is enough: only one thread calls MPI")


def _versions(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Ranks of one world must run the same software."""
    agreed = True
    for software in dict(ranks[0].versions):
        found = {rank.host: dict(rank.versions).get(software, "none") for rank in ranks}
        if len(set(found.values())) > 1:
            agreed = False
            where = ", ".join(f"{version} on {host}" for host, version in found.items())
            yield Finding("FAIL", f"{software} differs: {where}: use one environment on all hosts")
    if agreed:
        yield Finding("ok", "all ranks run the same software")


def _nodes(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    by_host = _by_host(ranks)
    for host, node_ranks in by_host.items():
        nodes = {rank.node for rank in node_ranks}
        if len(nodes) > 1:
            yield Finding(
                "warn",
                f"MPI sees {len(nodes)} nodes on host {host}: its ranks there cannot share memory, and talk over the "
                "network (are they in containers of their own?)",
            )
    for host, node_ranks in by_host.items():
        free = node_ranks[0].shared_memory_bytes
        if free is not None and free < MIN_SHARED_MEMORY_BYTES * len(node_ranks):
            yield Finding(
                "warn",
                f"host {host} has {free >> 20} MiB free in /dev/shm for {len(node_ranks)} ranks: enlarge it (a "
                "container: --shm-size=1g), or remove what killed jobs left there",
            )


def _cores(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    fine = True
    for host, node_ranks in _by_host(ranks).items():
        num_cores = len(frozenset().union(*(rank.cores for rank in node_ranks)))
        num_threads = sum(rank.num_threads for rank in node_ranks)
        if any(rank.crowded for rank in node_ranks):
            fine = False
            yield Finding(
                "warn",
                f"host {host} runs {len(node_ranks)} ranks with {num_threads} threads in all on {num_cores} cores: "
                f"start {num_cores} ranks or fewer there, bound to different cores, and leave OMP_NUM_THREADS unset",
            )
        elif num_threads * 2 <= num_cores:
            fine = False
            yield Finding(
                "warn",
                f"host {host} uses {num_threads} threads on {num_cores} cores: unset OMP_NUM_THREADS, or start more "
                "ranks",
            )
    if fine:
        yield Finding("ok", "each rank's threads have a core each")


def _gpus(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for host, node_ranks in _by_host(ranks).items():
        if node_ranks[0].has_nvidia and not node_ranks[0].torch_has_cuda:
            yield Finding(
                "warn", f"host {host} has NVIDIA GPUs that its torch cannot use: install a CUDA build of torch"
            )
        seen = Counter(gpu for rank in node_ranks for gpu in rank.gpus)
        if seen and len(seen) < len(node_ranks):
            yield Finding(
                "warn",
                f"host {host} runs {len(node_ranks)} ranks that see {len(seen)} GPUs: start {len(seen)} ranks there, "
                "or ask for a GPU for each",
            )


def _sums(domains: Sequence[DomainFacts]) -> Iterator[Finding]:
    wrong = [domain.name for domain in domains if not domain.sums_right]
    if wrong:
        yield Finding("FAIL", f"all-reduce gave a wrong sum in {', '.join(wrong)}: do not trust this MPI or NCCL here")
    else:
        yield Finding("ok", f"{len(domains)} domains opened, and each summed rightly")


def _shards_on_one_node(domains: Sequence[DomainFacts], nodes: Sequence[int]) -> Iterator[Finding]:
    spread = [d for d in domains if d.name.startswith("tp") and len({nodes[rank] for rank in d.world_ranks}) > 1]
    if spread:
        yield Finding(
            "warn",
            f"the shards of {', '.join(domain.name for domain in spread)} stand on different nodes, and sum over the "
            'network twice a layer: use [place] order = "tensor-inner", and a tensor that divides the ranks of a node',
        )
    else:
        yield Finding("ok", "the shards of each stage stand on one node")


def _slots(layout: Layout) -> Finding:
    if layout.num_slots < layout.pipeline:
        return Finding(
            "warn",
            f"{layout.num_slots} slots leave some of {layout.pipeline} stages idle: set [pipeline] slots = "
            f"{layout.pipeline} or more",
        )
    return Finding("ok", "the schedule runs to its end, with slots enough to keep all stages busy")


def _device(layout: Layout, device: str, ranks: Sequence[RankFacts]) -> Finding:
    if device == "cpu" and layout.device == "auto" and any(rank.gpus for rank in ranks):
        return Finding("warn", "computes on CPUs, because not every rank has a GPU of its own")
    return Finding("ok", f"computes on {'GPUs' if device == 'cuda' else 'CPUs'}")


def _by_host(ranks: Sequence[RankFacts]) -> dict[str, list[RankFacts]]:
    """Ranks by host name. (MPI may see several nodes on one host.)"""
    by_host: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        by_host.setdefault(rank.host, []).append(rank)
    return by_host
