"""One queue for all replicas: their heads pull requests as they have room, and hand back the outputs.

The model's first rank is the head of replica 0 and keeps the queue (`SharedInbox`); the other heads see it through
messages (`RemoteInbox`). Promises: no head ever waits for another between steps; a replica is given requests as long as
it holds less than its even part of what is unfinished, so that a slow one gets fewer; a run ends on all replicas
together. Refuses to know what a request says.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Generic, TypeVar

import msgspec

from mpiinfer.comm.domain import Domain
from mpiinfer.comm.domain import Request as Pending
from mpiinfer.engine.inbox import Inbox
from mpiinfer.engine.request import Output, Request


class Report(msgspec.Struct, array_like=True, frozen=True):
    """From a replica's head: how many requests it could take, and what it has finished. last: its run has ended."""

    room: int
    outputs: list[Output]
    last: bool


class Delivery(msgspec.Struct, array_like=True, frozen=True):
    """To a replica's head: requests to begin, indices to stop. closed: there will be no more requests. last: its last
    report has arrived."""

    requests: list[Request]
    cancelled: list[int]
    closed: bool
    last: bool


Message = TypeVar("Message", Report, Delivery)


class _Mail(Generic[Message]):
    """Messages with another head, without waiting: one receive is posted, sends complete in their own time."""

    def __init__(self, heads: Domain, peer: int, kind: type[Message]) -> None:
        """kind: of the messages that come."""
        self._heads = heads
        self._peer = peer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._arriving: Pending[bytes] | None = heads.irecv_message(peer)
        self._leaving: list[Pending[None]] = []

    def send(self, message: Report | Delivery) -> None:
        self._leaving = [pending for pending in self._leaving if not pending.test()]
        self._leaving.append(self._heads.isend_message(self._encoder.encode(message), self._peer))

    def receive(self) -> Message | None:
        """The next message, or None where none has come."""
        return self.wait() if self._arriving is not None and self._arriving.test() else None

    def wait(self) -> Message:
        """The next message, however late it comes."""
        assert self._arriving is not None
        message: Message = self._decoder.decode(self._arriving.wait(idle=True))
        self._arriving = None if message.last else self._heads.irecv_message(self._peer)
        return message

    def close(self) -> None:
        for pending in self._leaving:
            pending.wait()


class _Member:
    """What the keeper of the queue knows of another replica."""

    def __init__(self, heads: Domain, rank: int) -> None:
        self.mail = _Mail(heads, rank, Report)
        self.room = 0
        self.holds: set[int] = set()
        self.knows_closed = False
        self.has_ended = False


class SharedInbox(Inbox):
    """`inbox` as the head of replica 0 sees it: it gives the other replicas their parts whenever it is asked."""

    def __init__(self, inbox: Inbox, heads: Domain) -> None:
        self._inbox = inbox
        self._members = [_Member(heads, rank) for rank in range(1, heads.size)]
        self._holds: set[int] = set()
        self._cancelled: list[int] = []

    @property
    def num_ready(self) -> int:
        self._serve()
        return self._part(self._holds)

    def take(self, count: int) -> list[Request]:
        return self._give(self._holds, count)

    def take_cancelled(self) -> list[int]:
        taken, self._cancelled = self._cancelled, []
        return taken

    @property
    def is_closed(self) -> bool:
        """Closed on this replica too only when the others have ended: until then it serves them."""
        self._serve()
        return self._inbox.is_closed and all(member.has_ended for member in self._members)

    def deliver(self, output: Output) -> None:
        self._holds.discard(output.index)
        self._inbox.deliver(output)

    def rest(self) -> None:
        self._inbox.rest()

    def end(self) -> None:
        for member in self._members:
            member.mail.close()

    def _serve(self) -> None:
        """Take in reports, and give each member what it has room for."""
        cancelled = self._inbox.take_cancelled()
        self._cancelled += [index for index in cancelled if index in self._holds]
        for member in self._members:
            while not member.has_ended and (report := member.mail.receive()) is not None:
                member.room, member.has_ended = report.room, report.last
                for output in report.outputs:
                    member.holds.discard(output.index)
                    self._inbox.deliver(output)
                if report.last:
                    member.mail.send(Delivery([], [], closed=True, last=True))
        for member in self._members:
            if not member.has_ended:
                self._tell(member, [index for index in cancelled if index in member.holds])

    def _tell(self, member: _Member, cancelled: list[int]) -> None:
        requests = self._give(member.holds, member.room)
        member.room -= len(requests)
        closed = self._inbox.is_closed
        if requests or cancelled or closed != member.knows_closed:
            member.mail.send(Delivery(requests, cancelled, closed, last=False))
            member.knows_closed = closed

    def _give(self, holds: set[int], count: int) -> list[Request]:
        requests = self._inbox.take(min(count, self._part(holds)))
        holds.update(request.index for request in requests)
        return requests

    def _part(self, holds: set[int]) -> int:
        """How many more requests are an even part for the replica that has `holds`."""
        held = [self._holds, *(member.holds for member in self._members if not member.has_ended)]
        ready = self._inbox.num_ready
        return min(ready, max(0, ceil((ready + sum(map(len, held))) / len(held)) - len(holds)))


class RemoteInbox(Inbox):
    """The queue as the head of another replica sees it. Its outputs go back to the keeper."""

    def __init__(self, heads: Domain) -> None:
        self._mail = _Mail(heads, 0, Delivery)
        self._ready: deque[Request] = deque()
        self._cancelled: list[int] = []
        self._closed = False
        self._room = -1
        self._outputs: list[Output] = []

    @property
    def num_ready(self) -> int:
        while (delivery := self._mail.receive()) is not None:
            self._ready += delivery.requests
            self._cancelled += delivery.cancelled
            self._closed = delivery.closed
        return len(self._ready)

    def take(self, count: int) -> list[Request]:
        """Says too how much room is left, since the keeper gives no more than that."""
        taken = [self._ready.popleft() for _ in range(min(count, self.num_ready))]
        room = max(0, count - len(taken) - len(self._ready))
        if room != self._room or taken or self._outputs:
            self._report(room)
        return taken

    def take_cancelled(self) -> list[int]:
        taken, self._cancelled = self._cancelled, []
        return taken

    @property
    def is_closed(self) -> bool:
        return self._closed and not self.num_ready

    def deliver(self, output: Output) -> None:
        self._outputs.append(output)

    def end(self) -> None:
        self._report(0, last=True)
        while not self._mail.wait().last:
            pass
        self._mail.close()

    def _report(self, room: int, *, last: bool = False) -> None:
        self._mail.send(Report(room, self._outputs, last))
        self._room, self._outputs = room, []
