"""`World`: the root domain of a program, and what is known about the ranks in it.

Promises: `launch` (the command line) starts MPI, here and nowhere else, and stops at once when the launcher meant
another world than MPI found; `adopt` (other people's programs) takes a communicator as it is and changes nothing in
the process. Rank, size and node come from MPI; the environment is read for what the launcher meant and for what the
user asked for.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from mpiinfer.comm.agree import on_first
from mpiinfer.comm.device import DeviceDomain
from mpiinfer.comm.domain import Domain
from mpiinfer.comm.facts import (
    Launcher,
    assign_gpus,
    core_share,
    detect_launcher,
    number_nodes,
    singleton_complaint,
    startup_settings,
    wanted_threads,
)
from mpiinfer.comm.local import LocalDomain
from mpiinfer.comm.network import Network
from mpiinfer.comm.solo import SoloDomain
from mpiinfer.comm.waits import NoAbort, Waits, spin, yield_core
from mpiinfer.errors import AbortedError, EngineError, LaunchError, LayoutError, MpiinferError, UsageError

# mpi4py starts MPI when it is imported: whoever only wants `--help` or a plan must not import it.
if TYPE_CHECKING:
    from mpi4py import MPI

DEADLINE_S = 120.0
# What was printed must reach the launcher before the abort does.
PRINTED_S = 0.2
# A rank that only heard of a failure lets the rank that failed speak, and end the job, first.
GRACE_S = 5.0
# Files of MPICH, and of Open MPI.
_SHARED_MEMORY = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """The root domain, and facts about its ranks. Domains carved from it are closed before it is.

    hosts, nodes: host name and node index of each rank; nodes are numbered in the order of their first ranks.
    local_rank, num_local: my place among the ranks of this world on my node, and how many they are.
    num_cores: cores that I may run on. num_threads: my share of them, unless OMP_NUM_THREADS says otherwise.
    crowded: no core is mine alone, so waits yield it.
    network: what a device plane has to know (see `open_device`).
    """

    domain: Domain
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    local_rank: int
    num_local: int
    num_cores: int
    num_threads: int
    crowded: bool
    launcher: Launcher
    network: Network
    _free: Callable[[], None] = field(repr=False)

    def close(self) -> None:
        """Free what the world was made with. Collective; harmless the second time, and after a failure."""
        self._free()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def launch(*, deadline_s: float = DEADLINE_S) -> World:
    """Start MPI and open the world of all processes: for a program whose every rank calls this first.

    Sets the number of torch threads to the rank's share of its cores (OMP_NUM_THREADS wins), and `sys.excepthook` so
    that an exception which nobody catches ends every rank, after its traceback. Call verbs only on this thread.

    Raises LaunchError when MPI cannot start, or when the launcher meant more processes than MPI found. Every process is
    alone then and raises it; `Launcher.rank` of `detect_launcher` tells which one may speak.
    """
    _start_mpi()
    from mpi4py import MPI

    _install_abort_hook(MPI.COMM_WORLD)
    vendor = MPI.get_vendor()[0]
    complaint = singleton_complaint(detect_launcher(os.environ), MPI.COMM_WORLD.size, vendor, _own_mpiexec(vendor))
    if complaint is not None:
        raise LaunchError(complaint)
    world = _open_world(MPI.COMM_WORLD, deadline_s)
    _unname_shared_memory(world)
    torch.set_num_threads(world.num_threads)
    if world.network.interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={world.network.interface}")
    return world


def adopt(comm: MPI.Comm | Domain, *, deadline_s: float = DEADLINE_S) -> World:
    """Open a world over a communicator, or a domain, of a program that is not ours. Collective over it.

    The communicator is duplicated: no message of ours is ever taken for one of the caller's, and it remains the
    caller's to use and to free. Nothing else of the process is touched: no hook is set, the thread level stays (all
    calls on one thread at a time are enough), and torch keeps its threads. It would start one for each core in every
    rank, so that is worth a `torch.set_num_threads(world.num_threads)` by the caller; a warning is logged.

    Since no hook is set, an exception on one rank leaves the others waiting up to `deadline_s`, unless the caller ends
    them. Ranks of this world are numbered from 0, whatever they are in the caller's.
    """
    if isinstance(comm, DeviceDomain):
        comm = comm.host
    if isinstance(comm, (SoloDomain, LocalDomain)):
        world = _adopt_threads(comm, deadline_s)
    else:
        from mpi4py import MPI

        from mpiinfer.comm.mpi import MpiDomain

        if isinstance(comm, MpiDomain):
            comm = comm.comm
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise UsageError(f"comm = {comm!r}: must be an intracommunicator that this process is a member of")
        world = _open_world(comm, deadline_s)
    if torch.get_num_threads() > world.num_threads and world.domain.is_first:
        logger.warning(
            "torch uses %d threads in each rank, whose share of the cores is %d: call torch.set_num_threads(%d)",
            *(torch.get_num_threads(), world.num_threads, world.num_threads),
        )
    return world


# ---- opening


def _start_mpi() -> None:
    """Start MPI at thread level "funneled": only the engine's thread calls it, which is the main one.

    mpi4py would ask for "multiple", where MPICH takes its locks in every call: a blocking 2 KiB all-reduce of two
    ranks then takes 13 us instead of 1.8. Where the program started MPI before, its level stays.
    """
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)
    try:
        with warnings.catch_warnings():
            # It finds a launcher of another MPI suspicious; `launch` says that as an error, with the fix.
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise LaunchError(
            f"mpi4py finds no MPI library ({cause}): load your system's MPI module, or `pip install mpich`"
        ) from None
    if not MPI.Is_initialized():
        os.environ.update(startup_settings(os.environ, MPI.Get_library_version()))
        MPI.Init_thread(MPI.THREAD_FUNNELED)


def _own_mpiexec(vendor: str) -> str:
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    return str(beside) if beside.exists() else f"mpiexec of {vendor}"


def _open_world(comm: MPI.Intracomm, deadline_s: float) -> World:
    """The world over a duplicate of `comm`, with an abort channel of its own."""
    from mpi4py import MPI

    from mpiinfer.comm.mpi import MpiAbort, MpiDomain

    if comm.size == 1:
        solo = SoloDomain("world", (0,), Waits(NoAbort(), deadline_s))
        return _describe(solo, node=0, free=solo.close)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.allreduce(comm.rank, MPI.MIN)
    node.Free()
    abort = MpiAbort(comm)
    domain = MpiDomain(comm.Dup(), "world", range(comm.size), Waits(abort, deadline_s, yield_core))

    def free() -> None:
        if not domain.closed:
            domain.close()
            abort.close()

    return _describe(domain, node=leader, free=free)


def _adopt_threads(parent: SoloDomain | LocalDomain, deadline_s: float) -> World:
    """The world over a domain of threads, which all stand on one node and share one process."""
    domain = parent.subset(range(parent.size), name="world")
    domain.world_ranks = tuple(range(parent.size))
    domain.waits = Waits(parent.waits.abort, deadline_s, parent.waits.pause)
    return _describe(domain, node=0, free=domain.close)


def _describe(domain: Domain, *, node: int, free: Callable[[], None]) -> World:
    """Collect the facts of all ranks; `node` is any number that the ranks of one node share."""
    cores = frozenset(os.sched_getaffinity(0))
    mine = (socket.gethostname(), node, cores)
    ranks: list[tuple[str, int, frozenset[int]]] = domain.bcast_object(domain.gather_object(mine))
    local = [rank for rank, (_, where, _) in enumerate(ranks) if where == node]
    share = core_share(cores, [ranks[rank][2] for rank in local])
    wanted = wanted_threads(os.environ.get("OMP_NUM_THREADS"))
    num_threads = wanted or max(1, int(share))
    crowded = num_threads > share
    if domain.waits.pause in (spin, yield_core):
        domain.waits.pause = yield_core if crowded else spin
    hosts = tuple(host for host, _, _ in ranks)
    nodes = number_nodes([where for _, where, _ in ranks])
    job = domain.bcast_object(f"{os.environ.get('SLURM_JOB_ID', hosts[0])}-{os.getpid()}")
    return World(
        domain=domain,
        hosts=hosts,
        nodes=nodes,
        local_rank=local.index(domain.rank),
        num_local=len(local),
        num_cores=len(cores),
        num_threads=num_threads,
        crowded=crowded,
        launcher=detect_launcher(os.environ),
        network=Network(job, hosts, nodes, os.environ.get("MPIINFER_INTERFACE") or None),
        _free=free,
    )


# ---- failing


def _unname_shared_memory(world: World) -> None:
    """Remove the names of MPI's shared memory once each rank of the node has it open. Collective.

    MPI does so when it ends well; MPICH's file of a job that was aborted or killed, and Open MPI's of a single process,
    would stay for ever.
    """
    gathered = world.domain.gather_object(_mapped_files())
    mapped: list[frozenset[str]] = world.domain.bcast_object(gathered)
    if world.local_rank == 0:
        mine = world.nodes[world.domain.rank]
        on_node = [files for files, node in zip(mapped, world.nodes, strict=True) if node == mine]
        for path in frozenset.intersection(*on_node):
            Path(path).unlink(missing_ok=True)


def _mapped_files() -> frozenset[str]:
    """MPI's shared memory files that this process has mapped and that still have a name."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return frozenset()
    paths = (line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)"))
    return frozenset(path for path in paths if path.startswith(_SHARED_MEMORY))


def _install_abort_hook(comm: MPI.Intracomm) -> None:
    """An exception that nobody catches ends every rank: without it, the others wait in MPI for ever."""

    def end_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if comm.size > 1 and isinstance(error, AbortedError):
            time.sleep(GRACE_S)
        sys.stdout.flush()
        # In one write, or the lines of several ranks mix.
        sys.stderr.write("".join(_last_words(comm.rank, error, trace)))
        sys.stderr.flush()
        if comm.size > 1:
            time.sleep(PRINTED_S)
            comm.Abort(error.exit_status if isinstance(error, MpiinferError) else 1)

    sys.excepthook = end_all


def _last_words(rank: int, error: BaseException, trace: TracebackType | None) -> Sequence[str]:
    if isinstance(error, EngineError):  # its line names the rank already
        return [f"mpiinfer: error: {error}\n"]
    if isinstance(error, (MpiinferError, KeyboardInterrupt)):
        return [f"[rank {rank}] {type(error).__name__}: {error}\n"]
    return [f"[rank {rank}] failed, and ends the job\n", *traceback.format_exception(type(error), error, trace)]


# ---- devices


def choose_device(world: World, wanted: str) -> torch.device:
    """Where this rank computes, for [comm] device = "auto", "nccl", "mpi" or "gloo". Collective; all ranks agree.

    "nccl" takes the GPU of this rank's own. "auto" does so where every rank has one, and else computes on the CPU as
    "mpi" and "gloo" do. Which GPU is a rank's own follows from the local rank and from what is visible to it.

    Raises LayoutError on every rank when "nccl" finds a rank without a GPU of its own.
    """
    if wanted not in ("auto", "nccl"):
        return torch.device("cpu")
    visible = world.domain.gather_object(_visible_gpus())
    own: list[int] | None = on_first(world.domain, lambda: _own_gpus(world, visible, wanted))
    return torch.device("cpu") if own is None else torch.device("cuda", own[world.domain.rank])


def visible_gpus() -> tuple[str, ...]:
    """The ids of the GPUs that this process sees."""
    return _visible_gpus() or ()


def _visible_gpus() -> tuple[str, ...] | None:
    """None where torch could not use them together: it lacks NCCL."""
    if not torch.cuda.is_available():
        return ()
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))


def _own_gpus(world: World, visible: Sequence[tuple[str, ...] | None], wanted: str) -> list[int] | None:
    """Each rank's GPU as it counts them, or None when not every rank has its own (an error for "nccl")."""
    own: dict[int, int] = {}
    for node in dict.fromkeys(world.nodes):
        ranks = [rank for rank, where in enumerate(world.nodes) if where == node]
        for rank, gpu in zip(ranks, assign_gpus([visible[rank] or () for rank in ranks]), strict=True):
            if gpu is not None:
                own[rank] = gpu
        if len(own.keys() & set(ranks)) < len(ranks):
            if wanted == "nccl":
                raise LayoutError(_too_few_gpus(world, ranks, visible))
            return None
    return [own[rank] for rank in range(world.domain.size)]


def _too_few_gpus(world: World, ranks: Sequence[int], visible: Sequence[tuple[str, ...] | None]) -> str:
    host = world.hosts[ranks[0]]
    where = f'[comm] device = "nccl": on host {host}, ranks {", ".join(map(str, ranks))}'
    if any(visible[rank] is None for rank in ranks):
        return f'{where} use a torch without NCCL: install a CUDA build of torch, or set device = "mpi"'
    num_gpus = len({gpu for rank in ranks for gpu in visible[rank] or ()})
    fewer = f"start {num_gpus} ranks there, or " if num_gpus else ""
    return (
        f"{where} see {num_gpus} GPUs, but each needs its own: {fewer}ask for {len(ranks)} GPUs a node (under Slurm "
        '--gpus-per-node or --gpus-per-task=1), or set device = "mpi" to compute on CPUs'
    )
