"""`LocalDomain`: domains over the threads of one process, so that a test of six ranks is an ordinary function call.

Stricter than MPI where MPI is lenient: a send completes only when its receive has taken it (rendezvous), and a
collective that the ranks call with different verbs, shapes or dtypes is an error rather than a mystery.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from mpiinfer.comm.domain import Domain, Pending, no_value
from mpiinfer.comm.solo import SoloDomain
from mpiinfer.comm.waits import Abort, Waits
from mpiinfer.errors import AbortedError, DomainError

T = TypeVar("T")

POLL_SLEEP_S = 2e-5


class LocalAbort(Abort):
    """One flag that all threads see."""

    def __init__(self) -> None:
        self._cause: str | None = None

    def post(self, cause: str) -> None:
        self._cause = self._cause or cause

    def poll(self) -> str | None:
        return self._cause


class _Mail:
    """One direction between two ranks: sends and receives that wait for each other, in the order of posting.

    Whoever comes second hands the payload over, so that a receive needs no polling by its own rank. That is what MPI
    promises, too: a rank that waits for its send still takes what it has a receive for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sends: deque[_Send] = deque()
        self._receives: deque[_Receive] = deque()

    def post(self, *, send: _Send | None = None, receive: _Receive | None = None) -> None:
        with self._lock:
            if send is not None:
                self._sends.append(send)
            if receive is not None:
                self._receives.append(receive)
            while self._sends and self._receives:
                self._receives.popleft().take(self._sends.popleft())


@dataclass
class _Send:
    """A send on offer; it is done once a receive has taken it."""

    payload: Any
    taken: bool = False


@dataclass
class _Receive:
    """A receive on offer. What goes wrong in it is raised by the receiver, not by who sends."""

    use: Callable[[Any], Any]
    done: bool = False
    value: Any = None
    error: DomainError | None = None

    def take(self, send: _Send) -> None:
        try:
            self.value = self.use(send.payload)
        except DomainError as error:
            self.error = error
        self.done = send.taken = True

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


@dataclass
class _Round:
    """One collective call: what each rank brought, and how many have left."""

    brought: dict[int, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)
    num_left: int = 0


class _Hub:
    """What the threads of one domain share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rounds: dict[int, _Round] = defaultdict(_Round)
        self._mail: dict[tuple[str, int, int], _Mail] = {}
        self.children: dict[object, _Hub] = {}

    def mail(self, what: str, src: int, dst: int) -> _Mail:
        with self.lock:
            return self._mail.setdefault((what, src, dst), _Mail())

    def child(self, key: object) -> _Hub:
        with self.lock:
            return self.children.setdefault(key, _Hub())


class LocalDomain(Domain):
    """A domain of threads. Made by `run_local`; carved by `split` and `subset` like any other."""

    def __init__(self, hub: _Hub, name: str, world_ranks: Sequence[int], rank: int, waits: Waits) -> None:
        super().__init__(name, world_ranks, rank, waits)
        self._hub = hub
        self._num_collectives = 0
        self._subsets: dict[tuple[int, ...], int] = defaultdict(int)

    # ---- collectives: bring a copy, wait until all have, work the result out alone

    def _start_barrier(self) -> Pending[None]:
        return self._meet(("barrier",), None, lambda brought: None)

    def _start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending[torch.Tensor]:
        kind = ("broadcast", root, *_kind(tensor))
        return self._meet(kind, tensor.clone(), lambda brought: tensor.copy_(brought[root]))

    def _start_all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return self._meet(
            ("all_reduce", *_kind(tensor)), tensor.clone(), lambda brought: tensor.copy_(_sum(brought, tensor.dtype))
        )

    def _start_all_gather(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return self._meet(("all_gather", *_kind(tensor)), tensor.clone(), torch.stack)

    def _start_reduce_scatter(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        kind = ("reduce_scatter", *_kind(tensor))
        return self._meet(kind, tensor.clone(), lambda brought: _sum([b[self.rank] for b in brought], tensor.dtype))

    def _meet(self, kind: tuple[Any, ...], payload: Any, work: Callable[[list[Any]], T]) -> Pending[T]:
        number = self._num_collectives
        self._num_collectives += 1
        with self._hub.lock:
            self._hub.rounds[number].brought[self.rank] = (kind, payload)

        def arrived() -> bool:
            return len(self._hub.rounds[number].brought) == self.size

        def value() -> T:
            with self._hub.lock:
                round_ = self._hub.rounds[number]
                round_.num_left += 1
                if round_.num_left == self.size:
                    del self._hub.rounds[number]
            kinds = {rank: round_.brought[rank][0] for rank in range(self.size)}
            if len(set(kinds.values())) > 1:
                raise DomainError(f"{self!r}: the ranks meet in different collectives: {kinds}")
            return work([round_.brought[rank][1] for rank in range(self.size)])

        return Pending(arrived, value)

    # ---- between two ranks: rendezvous

    def _start_isend(self, tensor: torch.Tensor, dst: int) -> Pending[None]:
        return self._offer("tensor", tensor, dst)

    def _start_irecv(self, tensor: torch.Tensor, src: int) -> Pending[torch.Tensor]:
        def take(payload: torch.Tensor) -> torch.Tensor:
            if _kind(payload) != _kind(tensor):
                raise DomainError(f"{self!r}: receives {_kind(tensor)} from {src}, which sends {_kind(payload)}")
            return tensor.copy_(payload)

        return self._expect("tensor", src, take)

    def _start_isend_message(self, data: bytes, dst: int) -> Pending[None]:
        return self._offer("message", data, dst)

    def _start_irecv_message(self, src: int) -> Pending[bytes]:
        return self._expect("message", src, lambda payload: payload)

    def _offer(self, what: str, payload: Any, dst: int) -> Pending[None]:
        send = _Send(payload)
        self._hub.mail(what, self.rank, dst).post(send=send)
        return Pending(lambda: send.taken, no_value)

    def _expect(self, what: str, src: int, use: Callable[[Any], T]) -> Pending[T]:
        receive = _Receive(use)
        self._hub.mail(what, src, self.rank).post(receive=receive)
        return Pending(lambda: receive.done, receive.result)

    # ---- making and freeing

    def _split(self, color: int | None, key: int, name: str) -> Domain | None:
        number = self._num_collectives
        meeting = self._meet(("split",), (color, key), lambda brought: brought)
        self.waits.until(meeting.test, lambda: f"{self!r}: split")
        wishes: list[tuple[int | None, int]] = meeting.value()
        if color is None:
            return None
        members = sorted((k, rank) for rank, (c, k) in enumerate(wishes) if c == color)
        return self._child(tuple(rank for _, rank in members), name, ("split", number, color))

    def _subset(self, ranks: tuple[int, ...], name: str, tag: int) -> Domain:
        self._subsets[ranks] += 1
        return self._child(ranks, name, ("subset", ranks, tag, self._subsets[ranks]))

    def _child(self, ranks: tuple[int, ...], name: str, key: object) -> Domain:
        world_ranks = [self.world_ranks[rank] for rank in ranks]
        if len(ranks) == 1:
            return SoloDomain(name, world_ranks, self.waits)
        return LocalDomain(self._hub.child(key), name, world_ranks, ranks.index(self.rank), self.waits)

    def _close(self) -> None:
        pass


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype)


def _sum(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """In rank order, 16-bit floats through float32: the rule of comm/reduce for dtypes that MPI lacks."""
    staged = [t.float() if dtype in (torch.float16, torch.bfloat16) else t for t in tensors]
    total = staged[0].clone()
    for tensor in staged[1:]:
        total += tensor
    return total.to(dtype)


def run_local(size: int, work: Callable[[Domain], T], *, deadline_s: float = 60.0) -> list[T]:
    """Run `work` on `size` ranks, each a thread with its own world domain; return the ranks' results in order.

    The first rank that raises ends the others; its exception is raised here.
    """
    abort = LocalAbort()
    hub = _Hub()
    results: list[Any] = [None] * size
    failures: list[tuple[float, BaseException]] = []

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        waits = Waits(abort=abort, deadline_s=deadline_s, pause=lambda: time.sleep(POLL_SLEEP_S))
        members = tuple(range(size))
        world: Domain = LocalDomain(hub, "world", members, rank, waits)
        if size == 1:
            world = SoloDomain("world", members, waits)
        try:
            results[rank] = work(world)
        except BaseException as error:
            failures.append((time.perf_counter(), error))
            abort.post(f"rank {rank}: {error}")

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        causes = [error for _, error in sorted(failures, key=lambda f: f[0])]
        raise next((error for error in causes if not isinstance(error, AbortedError)), causes[0])
    return results
