"""What the launcher meant, and how the ranks of a node divide it: pure rules over facts that others collect.

Promises: no rank, size or local rank of MPI is ever taken from an environment variable; what a launcher says there is
only compared with what MPI found. Refuses to know MPI, torch and the environment itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

HYDRA = "mpiexec (hydra)"
OPEN_MPI = "mpiexec (Open MPI)"
SRUN = "srun (Slurm)"
NO_LAUNCHER = "none"

# The first of these that is set says how many processes the launcher started, and which of them this is.
_COUNTS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


@dataclass(frozen=True)
class Launcher:
    """Who started the processes, and how many it meant to be one world.

    size, size_from: the intended number and the variable that says it; None where nothing does.
    rank: the launcher's number for this process, 0 where it gave none. Good for one thing only: to let one process
        speak while MPI is not to be trusted.
    """

    name: str
    size: int | None = None
    size_from: str | None = None
    rank: int = 0


def detect_launcher(environ: Mapping[str, str]) -> Launcher:
    """What the environment of a process says about its launcher."""
    for size_from, rank_from in _COUNTS:
        size = _count(environ.get(size_from))
        if size is not None:
            name = _launcher_name(size_from, environ)
            return Launcher(name, size, size_from, _count(environ.get(rank_from)) or 0)
    return Launcher(NO_LAUNCHER)


def _launcher_name(size_from: str, environ: Mapping[str, str]) -> str:
    if size_from == "OMPI_COMM_WORLD_SIZE":
        return OPEN_MPI
    # hydra inside an allocation starts its proxies by srun, so its ranks see a step as well.
    by_srun = size_from == "SLURM_STEP_NUM_TASKS" or ("SLURM_STEP_ID" in environ and "MPI_LOCALNRANKS" not in environ)
    return SRUN if by_srun else HYDRA


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def singleton_complaint(launcher: Launcher, size: int, vendor: str, own_mpiexec: str) -> str | None:
    """Why a world of `size` ranks is not what the launcher meant, and the fix for the MPI library `vendor`.

    The launcher's and the library's ways of finding each other differ: every process is a world of its own, and each
    one would do all of the work. None when there is nothing to complain of.
    """
    if size != 1 or launcher.size is None or launcher.size == 1:
        return None
    if launcher.name == SRUN:
        kinds = {"MPICH": "srun --mpi=pmi2", "Open MPI": "srun --mpi=pmix"}
        fix = f"start it with `{kinds.get(vendor, 'srun --mpi=TYPE')}`"
        fix += "" if vendor in kinds else f", TYPE being what {vendor} was built for (`srun --mpi=list` names them)"
    else:
        fix = f"the mpiexec used is not that of the {vendor} which mpi4py loads: start it with `{own_mpiexec}`"
    return (
        f"{launcher.name} started {launcher.size} processes ({launcher.size_from}), but MPI finds 1 rank in each, so "
        f"every process is alone: {fix}"
    )


def startup_settings(environ: Mapping[str, str], library_version: str) -> dict[str, str]:
    """Environment variables to set before MPI starts.

    MPICH over UCX hands srun's PMI addresses that may be too long for it (pmodels/mpich#6924): with several ranks on
    each of several nodes, some starts hang or abort. Its other network module has short ones.
    """
    has_both = "MPICH" in library_version and "ucx" in library_version and "ofi" in library_version
    by_srun_pmi = "PMI_SIZE" in environ and detect_launcher(environ).name == SRUN
    if has_both and by_srun_pmi and "MPIR_CVAR_CH4_NETMOD" not in environ:
        return {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    return {}


def number_nodes(leaders: Sequence[int]) -> tuple[int, ...]:
    """Node index of each rank, numbered in the order of their first ranks; `leaders[r]` names the node of rank r.

    >>> number_nodes([0, 1, 0, 1])
    (0, 1, 0, 1)
    """
    index = {leader: node for node, leader in enumerate(dict.fromkeys(leaders))}
    return tuple(index[leader] for leader in leaders)


def core_share(mine: frozenset[int], masks: Sequence[frozenset[int]]) -> Fraction:
    """Cores due to a rank whose affinity mask is `mine`; `masks` are those of all ranks of the node, itself included.

    A core that several ranks may run on is divided among them. Below 1 the rank has no core to itself.

    >>> core_share(frozenset({0, 1}), [frozenset({0, 1})] * 4)
    Fraction(1, 2)
    """
    return sum((Fraction(1, sum(core in mask for mask in masks)) for core in mine), Fraction(0))


def wanted_threads(omp_num_threads: str | None) -> int | None:
    """The number of threads that OMP_NUM_THREADS asks for (its first level), or None where it asks for none."""
    count = _count((omp_num_threads or "").split(",")[0].strip())
    return count if count else None


def assign_gpus(visible: Sequence[Sequence[str]]) -> list[int | None]:
    """For each rank of a node, the index among its visible GPUs of one that is its own, or None.

    `visible[i]` are the ids of the GPUs that the node's i-th rank sees: one each under --gpus-per-task=1, all of them
    for every rank under --gpus-per-node. Ids tell one GPU seen by two ranks from two GPUs that both are called 0.

    >>> assign_gpus([["a", "b"], ["a", "b"], ["a", "b"]])
    [0, 1, None]
    >>> assign_gpus([["a"], ["b"]])
    [0, 0]
    """
    owner: dict[str, int] = {}

    def settle(rank: int, tried: set[str]) -> bool:
        """Give `rank` a GPU, moving others to another of theirs where that frees one."""
        start = rank % max(1, len(visible[rank]))
        for gpu in [*visible[rank][start:], *visible[rank][:start]]:
            if gpu not in tried:
                tried.add(gpu)
                if gpu not in owner or settle(owner[gpu], tried):
                    owner[gpu] = rank
                    return True
        return False

    for rank in range(len(visible)):
        settle(rank, set())
    own = {rank: gpu for gpu, rank in owner.items()}
    return [list(gpus).index(own[rank]) if rank in own else None for rank, gpus in enumerate(visible)]
