"""The one executor: interprets any schedule for one rank, and is the only place where activations cross ranks.

Promises: no send blocks, each lives in its slot's own buffer until its request completes; plans and results travel on
the replica's domain, activations on the pipeline's, so neither is taken for the other. Refuses to know what a plan
says beyond its slot and its number of tokens, and what a forward computes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from mpiinfer.comm.domain import Domain, Request
from mpiinfer.pipeline.schedule import Action, Kind, Schedule


class Plan(Protocol):
    """What the executor reads of a step's plan. A plan of no tokens computes nothing; a final one ends the run, and
    after one that says rest the next may come late."""

    @property
    def slot(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def is_final(self) -> bool: ...

    @property
    def is_rest(self) -> bool: ...


P = TypeVar("P", bound=Plan)


class Worker(Protocol[P]):
    """What a rank does with plans."""

    def accept(self, data: bytes) -> P:
        """Decode a plan and apply what it says of sequences that come and go."""

    def new_hidden(self, num_tokens: int) -> torch.Tensor:
        """A buffer for the activation of the stage before, [T, D]."""

    def forward(self, plan: P, hidden_TD: torch.Tensor | None, between: Callable[[], None]) -> torch.Tensor:
        """The activation for the next stage, [T, D]; it is not touched again before it was sent.

        `between` is called now and then while the layers run.
        """

    def finish(self, plan: P, hidden_TD: torch.Tensor | None, between: Callable[[], None]) -> bytes:
        """On the last stage: run, sample, and encode the result. Every shard takes part."""


class Head(Protocol):
    """What only the first rank of a replica does."""

    def next_plan(self, slot: int) -> bytes | None:
        """The slot's next plan, or None when there is nothing to do for it now."""

    def take_result(self, slot: int, data: bytes) -> None:
        """The result of the slot's last plan."""

    def catch_up(self) -> None:
        """Do what may be done while other ranks compute."""

    def pause(self) -> bytes | None:
        """Called when no slot has work: the plan that ends the run, or the one that tells the ranks to rest."""

    def wait(self) -> None:
        """After a plan that says rest: return when there is work, or when the run can end."""


class Executor(Generic[P]):
    """Runs `schedule` for the rank at `pp.rank`, in the replica whose head is rank 0 of `replica`."""

    def __init__(self, schedule: Schedule, replica: Domain, pp: Domain, worker: Worker[P], *, returns: bool) -> None:
        """`returns`: this rank is the one of the last stage that sends results to the head."""
        self._replica = replica
        self._pp = pp
        self._worker = worker
        self._returns = returns
        self._last_shard = replica.size - replica.size // pp.size
        self._actions = schedule.rounds[pp.rank]
        self._sends: dict[int, Request[None]] = {}
        self._announcements: list[Request[None]] = []
        self._plans: dict[int, P | None] = {}
        self._received: dict[int, torch.Tensor | None] = {}
        self._outgoing: dict[int, torch.Tensor | bytes] = {}
        self._due: set[int] = set()
        self.forward_s = 0.0  # in the stage, since the executor was made
        self._of_slot: dict[int, list[Action]] = defaultdict(list)
        for action in self._actions:
            self._of_slot[action.slot].append(action)

    def run(self, head: Head | None) -> None:
        """Run until the head's final plan. `head` is given on the replica's first rank only."""
        if head is None:
            self._follow()
        else:
            self._lead(head)
        for request in (*self._sends.values(), *self._announcements):
            request.wait()
        self._sends.clear()
        self._announcements.clear()

    def _lead(self, head: Head) -> None:
        while True:
            for kind, slot in self._actions:
                if kind is Kind.COLLECT:
                    self._collect(head, slot)
                elif kind is Kind.PLAN:
                    data = head.next_plan(slot)
                    self._plans[slot] = None if data is None else self._announce(data)
                else:
                    self._do(kind, slot)
            if not self._due and (data := head.pause()) is not None:
                if self._announce(data).is_final:
                    return
                head.wait()

    def _follow(self) -> None:
        rests = False
        while True:
            plan = self._worker.accept(self._replica.irecv_message(0).wait(idle=rests))
            if plan.is_final:
                return
            rests = plan.is_rest
            if not plan.num_tokens:
                continue
            self._plans[plan.slot] = plan
            for kind, slot in self._of_slot[plan.slot]:
                if kind not in (Kind.PLAN, Kind.COLLECT):
                    self._do(kind, slot)

    def _announce(self, data: bytes) -> P:
        """Tell the replica's other ranks, without waiting for them."""
        self._announcements = [request for request in self._announcements if not request.test()]
        self._announcements += [self._replica.isend_message(data, dst) for dst in range(1, self._replica.size)]
        return self._worker.accept(data)

    def _collect(self, head: Head, slot: int) -> None:
        if slot in self._due:
            self._due.remove(slot)
            arriving = self._replica.irecv_message(self._last_shard)
            head.catch_up()
            head.take_result(slot, arriving.wait())

    def _do(self, kind: Kind, slot: int) -> None:
        plan = self._plans.get(slot)
        if plan is None or not plan.num_tokens:
            return
        if kind is Kind.RECEIVE:
            self._received[slot] = self._pp.irecv(self._worker.new_hidden(plan.num_tokens), self._pp.prev).wait()
        elif kind is Kind.FORWARD:
            self._forward(plan, slot)
        elif kind is Kind.SEND:
            hidden_TD = self._outgoing[slot]
            assert isinstance(hidden_TD, torch.Tensor)
            self._sends[slot] = self._pp.isend(hidden_TD, self._pp.next)
        elif kind is Kind.RETURN and self._returns:
            result = self._outgoing[slot]
            assert isinstance(result, bytes)
            self._sends[slot] = self._replica.isend_message(result, 0)

    def _forward(self, plan: P, slot: int) -> None:
        hidden_TD = self._received.pop(slot, None)
        started = time.perf_counter()
        if self._pp.is_last:
            outgoing: torch.Tensor | bytes = self._worker.finish(plan, hidden_TD, self._move_sends)
        else:
            outgoing = self._worker.forward(plan, hidden_TD, self._move_sends)
        self.forward_s += time.perf_counter() - started
        pending = self._sends.pop(slot, None)
        if pending is not None:
            pending.wait()  # the slot's last send; its buffer is let go below
        self._outgoing[slot] = outgoing
        if self._replica.is_first:
            self._due.add(slot)

    def _move_sends(self) -> None:
        """Let MPI go on with what is being sent: between nodes a large message moves only while MPI is called, and the
        next stage would wait for it until this stage's layers are done."""
        for request in self._sends.values():
            request.test()
