"""`DeviceDomain`: the device plane. Tensors travel over a torch process group; all else over the host domain below it.

Promises: the group is built directly on a store of this domain alone, never by `new_group` and never as the default
group, because those need calls that all processes make in one order; waits are polled like all others; no port is
fixed, and the address that is used can be asked for. NCCL is the backend for GPUs. Gloo runs the same code path on
CPUs for tests; it is slow (milliseconds a call).

Every rank opens the planes of its domains in one agreed order, and that order warms them: NCCL builds communicators
when they are first used, one more for each pair of ranks that send, and blocks until all their members have come.
What one of its communicators does for a pair, it does in order, and a send waits there for its receive. Two groups,
one for sends to higher ranks and one for those to lower ranks, keep two stages that send to each other from a deadlock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch._C import _distributed_c10d as c10d

from mpiinfer.comm.agree import on_all
from mpiinfer.comm.domain import Accounts, Domain, Pending, no_value
from mpiinfer.comm.network import Network, open_store, own_address
from mpiinfer.errors import DomainError, LaunchError

T = TypeVar("T")

Backend = Literal["nccl", "gloo"]


def open_device(
    domain: Domain,
    backend: Backend,
    device: torch.device,
    network: Network,
    *,
    generation: int = 0,
    collectives: bool = True,
    edges: bool = True,
) -> Domain:
    """Give `domain` a device plane, which takes it over: closing the result closes both. Collective over the domain.

    device: where the tensors live that this rank will pass. generation: tells apart domains of one name.
    collectives, edges: which use to warm, see `DeviceDomain.warm`.
    A domain of one rank is returned as it is: its verbs move nothing, on any device.

    Raises LaunchError when the ranks cannot reach each other.
    """
    if domain.size == 1:
        return domain
    plane = DeviceDomain(domain, backend, device, network, generation)
    plane.warm(collectives=collectives, edges=edges)
    return plane


class DeviceDomain(Domain):
    """The ranks of `host` with tensors on `device`. Splits and subsets of it are host domains, to be opened anew."""

    def __init__(
        self, host: Domain, backend: Backend, device: torch.device, network: Network, generation: int = 0
    ) -> None:
        super().__init__(host.name, host.world_ranks, host.rank, host.waits)
        self.host = host
        self.backend = backend
        self.device = device
        self._is_warming = False
        self._store: Any
        self._store, self.address = open_store(host, network)
        own = own_address(host, network)
        # Beyond our own deadline: ours names the verb and the domain, this is the last resort.
        timeout = timedelta(seconds=2 * host.waits.deadline_s + 60)
        make = _make_nccl if backend == "nccl" else _make_gloo

        def make_groups() -> list[Any]:
            names = [f"{network.job}/{host.name}/{generation}/{direction}" for direction in ("up", "down")]
            return [make(c10d.PrefixStore(name, self._store), host, timeout, own) for name in names]

        # Collectives go over the first.
        self._groups = on_all(host, lambda: self._patiently("open", make_groups))

    def warm(self, *, collectives: bool = True, edges: bool = True) -> None:
        """Make the backend build now what it builds on first use: collectives, and sends between ring neighbours.

        Collective. Edges are warmed in ascending order, which all ranks agree on without talking.
        """
        token = torch.zeros(1, device=self.device)
        self._is_warming = True
        if collectives:
            self.all_reduce(token)
        for src in range(self.size) if edges else ():
            dst = (src + 1) % self.size
            if self.rank == src:
                self.isend(token, dst).wait()
            elif self.rank == dst:
                self.irecv(token, src).wait()
        self._is_warming = False
        self.accounts = Accounts()

    # ---- tensors: the group's

    def _start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending[torch.Tensor]:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self._run(tensor, lambda: self._groups[0].broadcast([_raw(tensor)], options), lambda: tensor)

    def _start_all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        staged = self._staged(tensor)
        back = (lambda: tensor) if staged is tensor else (lambda: tensor.copy_(staged))
        return self._run(staged, lambda: self._groups[0].allreduce([staged]), back)

    def _start_all_gather(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        return self._run(
            tensor, lambda: self._groups[0]._allgather_base(_raw(gathered), _raw(tensor)), lambda: gathered
        )

    def _start_reduce_scatter(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        staged = self._staged(tensor)
        mine = torch.empty_like(staged[0])
        return self._run(
            staged,
            lambda: self._groups[0]._reduce_scatter_base(mine.view(-1), staged.view(-1)),
            lambda: mine.to(tensor.dtype),
            gloo_blocks=True,
        )

    def _start_isend(self, tensor: torch.Tensor, dst: int) -> Pending[None]:
        group = self._groups[dst < self.rank]
        return self._run(tensor, lambda: group.send([_raw(tensor)], dst, 0), no_value, gloo_blocks=True)

    def _start_irecv(self, tensor: torch.Tensor, src: int) -> Pending[torch.Tensor]:
        group = self._groups[src > self.rank]
        return self._run(tensor, lambda: group.recv([_raw(tensor)], src, 0), lambda: tensor, gloo_blocks=True)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is summed in place of `tensor`: gloo rounds 16-bit floats after each addition, or lacks them."""
        if self.backend == "gloo" and tensor.dtype in (torch.bfloat16, torch.float16):
            return tensor.float()
        return tensor

    def _run(
        self, tensor: torch.Tensor, start: Callable[[], c10d.Work], value: Callable[[], T], *, gloo_blocks: bool = False
    ) -> Pending[T]:
        if tensor.device.type != self.device.type:
            raise DomainError(f"{self!r}: a tensor on {tensor.device} in a domain over {self.backend} on {self.device}")
        if tensor.numel() == 0:
            return Pending(lambda: True, value)
        work = self._patiently("warm", start) if self._is_warming else start()
        if gloo_blocks and self.backend == "gloo":
            return _WaitedFor(work, value, tensor)
        return Pending(work.is_completed, lambda: self._finish(work, value), keeps=tensor)

    def _finish(self, work: c10d.Work, value: Callable[[], T]) -> T:
        """The work is done: raise what went wrong in it, and order the current stream behind it."""
        work.wait()
        if self.backend == "nccl":
            for group in self._groups:
                if (error := group.get_error()) != c10d.ErrorType.SUCCESS:
                    raise DomainError(f"{self!r}: {self.accounts.last_action}: NCCL reports {error}")
        return value()

    def _patiently(self, verb: str, work: Callable[[], T]) -> T:
        """Run `work`, which blocks until peers come, on a thread of its own, and wait for it as for all else.

        MPI moves only while it is called. A rank that blocks elsewhere may hold back a message that it has already
        sent, and the peer that it blocks for may be waiting for just that one.
        """
        outcome: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.waits.until(lambda: not thread.is_alive(), lambda: f"{self!r}: {verb}")
        if errors:
            raise errors[0]
        return outcome[0]

    # ---- all else: the host's

    def _start_barrier(self) -> Pending[None]:
        return self.host._start_barrier()

    def _start_isend_message(self, data: bytes, dst: int) -> Pending[None]:
        return self.host._start_isend_message(data, dst)

    def _start_irecv_message(self, src: int) -> Pending[bytes]:
        return self.host._start_irecv_message(src)

    def _split(self, color: int | None, key: int, name: str) -> Domain | None:
        return self.host._split(color, key, name)

    def _subset(self, ranks: tuple[int, ...], name: str, tag: int) -> Domain:
        return self.host._subset(ranks, name, tag)

    def _close(self) -> None:
        # The groups go while all are there, the store when nobody's group can ask it any more.
        self.host.barrier()
        for group in self._groups:
            self._patiently("close", group.shutdown)
        self._groups.clear()
        self.host.barrier()
        self._store = None
        self.host.close()

    def _abandon(self) -> None:
        # Shutting down is collective and would wait for the dead.
        for group in self._groups:
            group.abort()
            if self.backend == "gloo":
                # Its abort does nothing, and its destructor waits for the dead while it holds the interpreter's lock.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.host.close()


class _WaitedFor(Pending[T]):
    """A gloo send, receive or reduce-scatter: it says that it is complete only to a thread that waits for it."""

    __slots__ = ("_error", "_thread", "_value", "_work")

    def __init__(self, work: c10d.Work, value: Callable[[], T], keeps: object) -> None:
        self._work = work
        self._value = value
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        super().__init__(lambda: not self._thread.is_alive(), self._finish, keeps)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error

    def _finish(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory: to move bytes, a backend need not know their dtype."""
    return tensor.view(-1).view(torch.uint8)


# ---- making the group


def _make_nccl(store: c10d.Store, host: Domain, timeout: timedelta, own_address: str) -> Any:
    make = getattr(c10d, "ProcessGroupNCCL", None)
    if make is None:
        raise LaunchError('this torch has no NCCL: install a CUDA build of torch, or set [comm] device = "mpi"')
    options = make.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(host.world_ranks)
    options.group_name = host.name
    return make(store, host.rank, host.size, options)


def _make_gloo(store: c10d.Store, host: Domain, timeout: timedelta, own_address: str) -> Any:
    make: Any = c10d.ProcessGroupGloo
    options = make._Options()
    options._devices = [make.create_device(hostname=own_address)]
    options._timeout = timeout
    return make(store, host.rank, host.size, options)
