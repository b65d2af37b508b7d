"""`MpiDomain`: a domain over an mpi4py communicator of its own. The data plane of CPUs, the control plane of all.

Promises: only non-blocking MPI calls once a domain is open, so that `Waits` can look at deadlines and aborts; buffers
of at most 1 GiB a message (Open MPI refuses 2 GiB); tensors on a GPU are staged through the host. MPI ranks that come
out of a split alone become solo domains: a communicator is a scarce thing (MPICH allows 2,046).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpiinfer.comm.domain import Domain, Pending, no_value
from mpiinfer.comm.reduce import sum_type
from mpiinfer.comm.solo import SoloDomain
from mpiinfer.comm.waits import Abort, Waits

TENSOR_TAG = 1
MESSAGE_TAG = 2
ABORT_TAG = 3
MAX_MESSAGE_BYTES = 1 << 30


class MpiAbort(Abort):
    """Failure notices on a communicator of their own, so that they match nothing else."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm.Dup()
        self._cause: str | None = None
        # Requests and their buffers live until the end: a failed world is never waited for.
        self._sent: list[tuple[MPI.Request, bytes]] = []

    def post(self, cause: str) -> None:
        self._cause = cause
        data = cause.encode()
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._sent.append((self._comm.Isend([data, MPI.BYTE], rank, ABORT_TAG), data))

    def poll(self) -> str | None:
        if self._cause is None:
            status = MPI.Status()
            if self._comm.Iprobe(MPI.ANY_SOURCE, ABORT_TAG, status):
                buffer = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv([buffer, MPI.BYTE], status.Get_source(), ABORT_TAG)
                self._cause = buffer.decode()
        return self._cause

    def close(self) -> None:
        """Free the communicator; collective, and only after a world that did not fail."""
        if self._cause is None:
            self._comm.Free()


class MpiDomain(Domain):
    """A domain over `comm`, which it owns and frees."""

    def __init__(self, comm: MPI.Intracomm, name: str, world_ranks: Sequence[int], waits: Waits) -> None:
        super().__init__(name, world_ranks, comm.rank, waits)
        self._comm = comm
        self._expected: dict[int, deque[_MessageReceive]] = defaultdict(deque)

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator, to make another one from; its messages are the domain's own."""
        return self._comm

    # ---- collectives

    def _start_barrier(self) -> Pending[None]:
        return Pending(self._comm.Ibarrier().Test, no_value)

    def _start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending[torch.Tensor]:
        host, back = _host(tensor)
        requests = [self._comm.Ibcast((part, MPI.BYTE), root) for part in _parts(host)]
        return Pending(_all(requests), back)

    def _start_all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        datatype = sum_type(tensor.dtype)
        if tensor.is_cpu and datatype is not None:
            request = self._comm.Iallreduce(MPI.IN_PLACE, (_buffer(tensor), datatype))
            return Pending(request.Test, lambda: tensor)
        staged = tensor.to("cpu", torch.float32 if datatype is None else tensor.dtype)
        request = self._comm.Iallreduce(MPI.IN_PLACE, (_buffer(staged), datatype or MPI.FLOAT))
        return Pending(request.Test, lambda: tensor.copy_(staged))

    def _start_all_gather(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        host = tensor.cpu()
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        request = self._comm.Iallgather((_buffer(host), MPI.BYTE), (_buffer(gathered), MPI.BYTE))
        return Pending(request.Test, lambda: gathered.to(tensor.device), keeps=host)

    def _start_reduce_scatter(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        datatype = sum_type(tensor.dtype)
        host = tensor.to("cpu", torch.float32 if datatype is None else tensor.dtype)
        mine = torch.empty(tensor.shape[1:], dtype=host.dtype)
        mpi_type = datatype or MPI.FLOAT
        request = self._comm.Ireduce_scatter_block((_buffer(host), mpi_type), (_buffer(mine), mpi_type))
        return Pending(request.Test, lambda: mine.to(tensor.device, tensor.dtype), keeps=host)

    # ---- between two ranks

    def _start_isend(self, tensor: torch.Tensor, dst: int) -> Pending[None]:
        host = tensor.cpu()
        requests = [self._comm.Isend((part, MPI.BYTE), dst, TENSOR_TAG) for part in _parts(host)]
        return Pending(_all(requests), no_value, keeps=host)

    def _start_irecv(self, tensor: torch.Tensor, src: int) -> Pending[torch.Tensor]:
        host, back = _host(tensor, fill=False)
        requests = [self._comm.Irecv((part, MPI.BYTE), src, TENSOR_TAG) for part in _parts(host)]
        return Pending(_all(requests), back)

    def _start_isend_message(self, data: bytes, dst: int) -> Pending[None]:
        request = self._comm.Isend((data, MPI.BYTE), dst, MESSAGE_TAG)
        return Pending(request.Test, no_value, keeps=data)

    def _start_irecv_message(self, src: int) -> Pending[bytes]:
        return _MessageReceive(self._comm, src, self._expected[src])

    # ---- making and freeing

    def _split(self, color: int | None, key: int, name: str) -> Domain | None:
        # Split itself blocks: come to it only when all ranks have.
        self.waits.until(self._comm.Ibarrier().Test, lambda: f"{self!r}: split")
        comm = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        if comm == MPI.COMM_NULL:
            return None
        assert isinstance(comm, MPI.Intracomm)
        return self._child(comm, name)

    def _subset(self, ranks: tuple[int, ...], name: str, tag: int) -> Domain:
        mine = self._comm.Get_group()
        group = mine.Incl(list(ranks))
        comm = self._comm.Create_group(group, tag)
        group.Free()
        mine.Free()
        return self._child(comm, name)

    def _child(self, comm: MPI.Intracomm, name: str) -> Domain:
        mine, theirs = self._comm.Get_group(), comm.Get_group()
        positions = theirs.Translate_ranks(list(range(comm.size)), mine)
        mine.Free()
        theirs.Free()
        world_ranks = [self.world_ranks[position] for position in positions]
        if comm.size == 1:
            comm.Free()
            return SoloDomain(name, world_ranks, self.waits)
        return MpiDomain(comm, name, world_ranks, self.waits)

    def _close(self) -> None:
        self._comm.Free()


class _MessageReceive(Pending[bytes]):
    """A message of unknown length: matched by probing, then received into a buffer of its size.

    Receives match messages in the order in which they were posted, whichever is polled first.
    """

    __slots__ = ("_buffer", "_comm", "_expected", "_request", "_src", "_status")

    def __init__(self, comm: MPI.Comm, src: int, expected: deque[_MessageReceive]) -> None:
        super().__init__(self._poll, self._take)
        self._comm = comm
        self._src = src
        self._expected = expected
        self._status = MPI.Status()
        self._buffer = bytearray()
        self._request: MPI.Request | None = None
        expected.append(self)

    def _poll(self) -> bool:
        while self._request is None:
            message = self._comm.Improbe(self._src, MESSAGE_TAG, self._status)
            if message is None:
                return False
            self._expected.popleft()._receive(message, self._status.Get_count(MPI.BYTE))
        return self._request.Test()

    def _receive(self, message: MPI.Message, num_bytes: int) -> None:
        self._buffer = bytearray(num_bytes)
        self._request = message.Irecv((self._buffer, MPI.BYTE))

    def _take(self) -> bytes:
        return bytes(self._buffer)


def _buffer(tensor: torch.Tensor, start: int = 0, num_bytes: int | None = None) -> MPI.buffer:
    """The memory of a contiguous CPU tensor, whatever its dtype. It does not keep the tensor alive.

    Four times faster than `tensor.numpy()`, which lacks bfloat16 as well.
    """
    return MPI.buffer.fromaddress(tensor.data_ptr() + start, tensor.nbytes if num_bytes is None else num_bytes)


def _host(tensor: torch.Tensor, *, fill: bool = True) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """`tensor` in host memory, and what brings it back: nothing for a CPU tensor, a copy for one on a GPU."""
    if tensor.is_cpu:
        return tensor, lambda: tensor
    host = tensor.cpu() if fill else torch.empty(tensor.shape, dtype=tensor.dtype)
    return host, lambda: tensor.copy_(host)


def _parts(tensor: torch.Tensor) -> list[MPI.buffer]:
    """The memory of `tensor` in messages of at most MAX_MESSAGE_BYTES."""
    num_bytes = tensor.nbytes
    if num_bytes <= MAX_MESSAGE_BYTES:
        return [_buffer(tensor)]
    starts = range(0, num_bytes, MAX_MESSAGE_BYTES)
    return [_buffer(tensor, start, min(MAX_MESSAGE_BYTES, num_bytes - start)) for start in starts]


def _all(requests: list[MPI.Request]) -> Callable[[], bool]:
    if len(requests) == 1:
        return requests[0].Test
    return lambda: MPI.Request.Testall(requests)
