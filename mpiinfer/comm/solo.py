"""`SoloDomain`: the domain of one rank. Collectives return what they were given; sends reach my own mailbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from mpiinfer.comm.domain import Domain, Pending, no_value
from mpiinfer.comm.waits import NoAbort, Waits
from mpiinfer.errors import DomainError

T = TypeVar("T")


def _done() -> bool:
    return True


class _Mailbox(Generic[T]):
    """Sends meet receives in the order in which both were posted, whichever is polled first."""

    def __init__(self) -> None:
        self._sent: deque[T] = deque()
        self._expected: deque[list[T]] = deque()

    def put(self, item: T) -> Pending[None]:
        if self._expected:
            self._expected.popleft().append(item)
        else:
            self._sent.append(item)
        return Pending(_done, no_value)

    def take(self, use: Callable[[T], T]) -> Pending[T]:
        got: list[T] = []
        if self._sent:
            got.append(self._sent.popleft())
        else:
            self._expected.append(got)
        return Pending(lambda: bool(got), lambda: use(got[0]))


class SoloDomain(Domain):
    """A size-1 member of any family; it shares the abort channel and deadline of the world that it was carved from."""

    def __init__(self, name: str = "solo", world_ranks: Sequence[int] = (0,), waits: Waits | None = None) -> None:
        super().__init__(name, world_ranks, 0, waits or Waits(abort=NoAbort()))
        self._tensors: _Mailbox[torch.Tensor] = _Mailbox()
        self._messages: _Mailbox[bytes] = _Mailbox()

    def _start_barrier(self) -> Pending[None]:
        return Pending(_done, no_value)

    def _start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending[torch.Tensor]:
        return Pending(_done, lambda: tensor)

    def _start_all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return Pending(_done, lambda: tensor)

    def _start_all_gather(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return Pending(_done, lambda: tensor.unsqueeze(0))

    def _start_reduce_scatter(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return Pending(_done, lambda: tensor[0])

    def _start_isend(self, tensor: torch.Tensor, dst: int) -> Pending[None]:
        return self._tensors.put(tensor.clone())

    def _start_irecv(self, tensor: torch.Tensor, src: int) -> Pending[torch.Tensor]:
        def fill(sent: torch.Tensor) -> torch.Tensor:
            if sent.shape != tensor.shape or sent.dtype != tensor.dtype:
                theirs, mine = (f"{t.dtype} {tuple(t.shape)}" for t in (sent, tensor))
                raise DomainError(f"{self!r}: receives {mine}, but {theirs} was sent")
            return tensor.copy_(sent)

        return self._tensors.take(fill)

    def _start_isend_message(self, data: bytes, dst: int) -> Pending[None]:
        return self._messages.put(data)

    def _start_irecv_message(self, src: int) -> Pending[bytes]:
        return self._messages.take(lambda data: data)

    def _split(self, color: int | None, key: int, name: str) -> Domain | None:
        return None if color is None else SoloDomain(name, self.world_ranks, self.waits)

    def _subset(self, ranks: tuple[int, ...], name: str, tag: int) -> Domain:
        return SoloDomain(name, self.world_ranks, self.waits)

    def _close(self) -> None:
        pass
