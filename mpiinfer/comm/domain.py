"""`Domain`: an immutable, named, ordered set of ranks that communicate, and my place in it.

Promises: ranks are relative to the domain; size 1 is an ordinary member; every public verb counts calls, bytes and
waiting time, records what it does and honours the deadline, in this one file. Refuses to know what carries the bytes
(members of the family: solo, mpi, local, device) and what they mean.

There is no blocking send: a ring of them deadlocks. Every wait is polled, so that a deadline or another rank's
failure ends it (`Waits`).
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from mpiinfer.comm.waits import Waits
from mpiinfer.errors import DomainError

T = TypeVar("T")


class Pending(Generic[T]):
    """An operation that a member of the family has started: `test` polls it, `value` finishes and returns it.

    `keeps` is memory that must live as long as the operation does.
    """

    __slots__ = ("keeps", "test", "value")

    def __init__(self, test: Callable[[], bool], value: Callable[[], T], keeps: object = None) -> None:
        self.test = test
        self.value = value
        self.keeps = keeps


def no_value() -> None:
    """`value` of a pending operation that has none."""


class Request(Generic[T]):
    """A posted send or receive. What it was given must stay untouched until `wait` returns."""

    __slots__ = ("_domain", "_pending", "_result", "_verb", "done")

    def __init__(self, domain: Domain, verb: str, pending: Pending[T]) -> None:
        self._domain = domain
        self._verb = verb
        self._pending: Pending[T] | None = pending
        self._result: T | None = None
        self.done = False

    def test(self) -> bool:
        """True once the operation is complete; never blocks."""
        if self._pending is not None and self._pending.test():
            self._finish()
        return self.done

    def wait(self, *, idle: bool = False) -> T:
        """Complete the operation and return its result (the received tensor or message; None for a send)."""
        if self._pending is not None:
            self._domain._await(self._verb, self._pending.test, idle=idle)
            self._finish()
        return self._result  # type: ignore[return-value]

    def _finish(self) -> None:
        assert self._pending is not None
        self._domain._posted.discard(self._pending)
        self._result = self._pending.value()
        self._pending = None
        self.done = True


@dataclass(slots=True)
class VerbStats:
    """What one verb of one domain has cost: number of calls, payload bytes, seconds spent waiting."""

    num_calls: int = 0
    num_bytes: int = 0
    wait_s: float = 0.0


@dataclass(slots=True)
class Accounts:
    """Per verb costs of a domain, and the last action begun (for the report of a stuck rank)."""

    verbs: dict[str, VerbStats] = field(default_factory=dict)
    last_action: str = "nothing yet"

    def begin(self, verb: str, num_bytes: int) -> VerbStats:
        stats = self.verbs.get(verb)
        if stats is None:
            stats = self.verbs[verb] = VerbStats()
        stats.num_calls += 1
        stats.num_bytes += num_bytes
        self.last_action = verb
        return stats

    @property
    def wait_s(self) -> float:
        return sum(stats.wait_s for stats in self.verbs.values())


class Domain(ABC):
    """An ordered set of ranks, and my place in it. `world_ranks` are the members' ranks in the root domain."""

    def __init__(self, name: str, world_ranks: Sequence[int], rank: int, waits: Waits) -> None:
        self.name = name
        self.world_ranks = tuple(world_ranks)
        self.rank = rank
        self.waits = waits
        self.accounts = Accounts()
        self.closed = False
        # Operations under way: their memory outlives a rank that gave up waiting for them.
        self._posted: set[Pending[Any]] = set()

    # ---- place

    @property
    def size(self) -> int:
        return len(self.world_ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def next(self) -> int:
        """The rank after mine, around the ring."""
        return (self.rank + 1) % self.size

    @property
    def prev(self) -> int:
        """The rank before mine, around the ring."""
        return (self.rank - 1) % self.size

    def __repr__(self) -> str:
        members = ",".join(map(str, self.world_ranks))
        return f"{self.name}[{self.rank}/{self.size}]{{{members}}}"

    # ---- collectives on tensors

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self._perform("barrier", 0, self._start_barrier)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Overwrite `tensor` on every rank with the root's. Same shape and dtype everywhere, contiguous."""
        self._check_rank(root)
        return self._perform("broadcast", tensor.nbytes, self._start_broadcast, _contiguous(tensor), root)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place. Same shape and dtype everywhere, contiguous. Dtype rules: comm/reduce."""
        return self._perform("all_reduce", tensor.nbytes, self._start_all_reduce, _contiguous(tensor))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, stacked as [size, *shape]. Same shape and dtype everywhere.

        The result is to be read: at size 1 it shares the memory of `tensor` (as it does for `reduce_scatter`).
        """
        return self._perform("all_gather", tensor.nbytes * self.size, self._start_all_gather, tensor.contiguous())

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum [size, *shape] over the ranks and return my row, [*shape]."""
        if tensor.shape[0] != self.size:
            raise DomainError(f"{self!r}: reduce_scatter of {tuple(tensor.shape)}: the first dim must be {self.size}")
        return self._perform("reduce_scatter", tensor.nbytes, self._start_reduce_scatter, tensor.contiguous())

    # ---- between two ranks

    def isend(self, tensor: torch.Tensor, dst: int) -> Request[None]:
        """Start sending; `tensor` must stay untouched until the request completes."""
        self._check_rank(dst)
        return self._post("isend", tensor.nbytes, self._start_isend, _contiguous(tensor), dst)

    def irecv(self, tensor: torch.Tensor, src: int) -> Request[torch.Tensor]:
        """Start receiving into `tensor`, whose shape and dtype are the sender's."""
        self._check_rank(src)
        return self._post("irecv", tensor.nbytes, self._start_irecv, _contiguous(tensor), src)

    def isend_message(self, data: bytes, dst: int) -> Request[None]:
        """Start sending bytes of any length: plans and results."""
        self._check_rank(dst)
        return self._post("isend_message", len(data), self._start_isend_message, data, dst)

    def irecv_message(self, src: int) -> Request[bytes]:
        """Start receiving the next message of `src`. Messages and tensors between two ranks never meet."""
        self._check_rank(src)
        return self._post("irecv_message", 0, self._start_irecv_message, src)

    # ---- objects: pickled, for start-up only

    def bcast_object(self, value: T | None, root: int = 0, *, idle: bool = False) -> T:
        """The root's object, on every rank. Slow: pickled and sent one by one."""
        self._check_rank(root)
        if self.rank != root:
            received: T = pickle.loads(self.irecv_message(root).wait(idle=idle))
            return received
        data = pickle.dumps(value)
        for request in [self.isend_message(data, dst) for dst in range(self.size) if dst != root]:
            request.wait(idle=idle)
        return value  # type: ignore[return-value]

    def gather_object(self, value: T, root: int = 0, *, idle: bool = False) -> list[T]:
        """All ranks' objects in order on the root, an empty list elsewhere. Slow, like `bcast_object`."""
        self._check_rank(root)
        if self.rank != root:
            self.isend_message(pickle.dumps(value), root).wait(idle=idle)
            return []
        requests = {src: self.irecv_message(src) for src in range(self.size) if src != root}
        return [value if src == root else pickle.loads(requests[src].wait(idle=idle)) for src in range(self.size)]

    # ---- making and freeing domains

    def split(self, color: int | None, key: int = 0, *, name: str) -> Domain | None:
        """Carve domains: ranks of equal color, ordered by (key, rank). Collective; color None joins none of them."""
        return self._perform_blocking("split", lambda: self._split(color, key, name))

    def subset(self, ranks: Sequence[int], *, name: str, tag: int = 0) -> Domain:
        """A domain of some of my ranks, in the given order. Called by its members only, all with the same tag."""
        for rank in ranks:
            self._check_rank(rank)
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise DomainError(f"{self!r}: subset of {list(ranks)} must name each rank once, and me among them")
        return self._perform_blocking("subset", lambda: self._subset(tuple(ranks), name, tag))

    def close(self) -> None:
        """Free what the domain holds. Collective over its ranks; calling it twice is harmless.

        After a failure in the world nothing is freed, because freeing would wait for the dead: it is quarantined.
        """
        if self.closed:
            return
        self.closed = True
        if self.waits.abort.poll() is None:
            self._close()
        else:
            self.waits.quarantine.append(self)
            self._abandon()

    def __enter__(self) -> Domain:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- what the members of the family implement

    @abstractmethod
    def _start_barrier(self) -> Pending[None]: ...

    @abstractmethod
    def _start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_all_gather(self, tensor: torch.Tensor) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_reduce_scatter(self, tensor: torch.Tensor) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_isend(self, tensor: torch.Tensor, dst: int) -> Pending[None]: ...

    @abstractmethod
    def _start_irecv(self, tensor: torch.Tensor, src: int) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_isend_message(self, data: bytes, dst: int) -> Pending[None]: ...

    @abstractmethod
    def _start_irecv_message(self, src: int) -> Pending[bytes]: ...

    @abstractmethod
    def _split(self, color: int | None, key: int, name: str) -> Domain | None: ...

    @abstractmethod
    def _subset(self, ranks: tuple[int, ...], name: str, tag: int) -> Domain: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _abandon(self) -> None:  # noqa: B027
        """Stop what runs without waiting for any other rank; the default has nothing to stop."""

    # ---- the one place where verbs are counted and waited for

    def _perform(self, verb: str, num_bytes: int, start: Callable[..., Pending[T]], *args: Any) -> T:
        if self.closed:
            self._check_open(verb)
        stats = self.accounts.begin(verb, num_bytes)
        pending = start(*args)
        test = pending.test
        if not test():
            self._posted.add(pending)
            stats.wait_s += self.waits.until(test, lambda: f"{self!r}: {verb}")
            self._posted.discard(pending)
        return pending.value()

    def _perform_blocking(self, verb: str, work: Callable[[], T]) -> T:
        self._check_open(verb)
        stats = self.accounts.begin(verb, 0)
        start = time.perf_counter()
        result = work()
        stats.wait_s += time.perf_counter() - start
        return result

    def _post(self, verb: str, num_bytes: int, start: Callable[..., Pending[T]], *args: Any) -> Request[T]:
        self._check_open(verb)
        self.accounts.begin(verb, num_bytes)
        pending = start(*args)
        self._posted.add(pending)
        return Request(self, verb, pending)

    def _await(self, verb: str, test: Callable[[], bool], *, idle: bool = False) -> None:
        if test():
            return
        waited_s = self.waits.until(test, lambda: f"{self!r}: {verb}", idle=idle)
        if not idle:
            self.accounts.verbs[verb].wait_s += waited_s

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise DomainError(f"{self!r}: there is no rank {rank}, ranks are 0 to {self.size - 1}")

    def _check_open(self, verb: str) -> None:
        if self.closed:
            raise DomainError(f"{self!r}: {verb} after close")


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Verbs that write in place cannot take a strided view: a hidden copy would swallow the result."""
    if not tensor.is_contiguous():
        raise DomainError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    return tensor
