"""`Replica`: one data-parallel copy of the model as it runs, from an inbox to the inbox, on each of its ranks.

Puts together what a run needs: the executor of this rank's stage, and on the head the scheduler over the agreed blocks
and the loop that feeds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mpiinfer.engine.blocks import BlockPool
from mpiinfer.engine.generation import Answers
from mpiinfer.engine.inbox import Inbox
from mpiinfer.engine.loop import HeadLoop
from mpiinfer.engine.replicas import RemoteInbox, SharedInbox
from mpiinfer.engine.request import Request
from mpiinfer.engine.runner import Runner
from mpiinfer.engine.scheduler import Limits, Scheduler
from mpiinfer.engine.stats import RankTimes, RequestTimes
from mpiinfer.layout.mesh import Mesh
from mpiinfer.layout.spec import Layout
from mpiinfer.model.config import ModelConfig
from mpiinfer.model.stage import Stage
from mpiinfer.pipeline.executor import Executor
from mpiinfer.pipeline.schedule import check, ring
from mpiinfer.plan.cost import stage_works

# Tokens of a step, and sequences of a slot: enough for full speed, and a bound on the memory of activations and logits
# and on how long a step takes.
MAX_STEP_TOKENS = 512
MAX_SLOT_SEQUENCES = 256


class Replica:
    """This rank's part of the replica that `mesh` places it in. Closing the domains is the caller's."""

    def __init__(self, layout: Layout, mesh: Mesh, stage: Stage, num_blocks: int) -> None:
        self._layout = layout
        self._mesh = mesh
        self._config: ModelConfig = stage.config
        self._num_blocks = num_blocks
        stage.allocate_cache(num_blocks, layout.block_tokens)
        self._runner = Runner(stage, mesh.tp)
        schedule = ring(layout.pipeline, layout.num_slots)
        check(schedule)
        returns = mesh.pp.is_last and mesh.tp.is_first
        self._executor = Executor(schedule, mesh.replica, mesh.pp, self._runner, returns=returns)

    @property
    def step(self) -> int:
        """Number of the last step that this rank has heard of, -1 between runs."""
        return self._runner.step

    def run(
        self, inbox: Inbox | None, begin: Callable[[Request], Answers], concurrency: int | None
    ) -> tuple[RankTimes, list[RequestTimes]]:
        """Answer what comes until the inbox is closed. Collective over all replicas; `inbox` on the model's first rank.

        concurrency: sequences that run at once at most over all replicas. Returns how this rank's time went, and on a
        replica's head when the tokens of its requests came.
        """
        if not self._mesh.replica.is_first:
            return self._timed(None), []
        heads = self._mesh.heads
        assert heads is not None
        mine = RemoteInbox(heads) if inbox is None else SharedInbox(inbox, heads)
        waits = self._mesh.replica.waits

        def wait(test: Callable[[], bool]) -> float:
            return waits.until(test, lambda: "a request", idle=True, rest=mine.rest)

        head = HeadLoop(mine, self._scheduler(concurrency), begin, wait)
        times = self._timed(head)
        mine.end()
        return times, head.times

    def _scheduler(self, concurrency: int | None) -> Scheduler:
        layout, config = self._layout, self._config
        most = MAX_SLOT_SEQUENCES * layout.num_slots
        sequences = most if concurrency is None else min(most, -(-concurrency // layout.replicas))
        # Two products of num_heads * head_dim elements with each token of context, against the layer's weights.
        attention_cost = 2 * config.num_heads * config.head_dim / stage_works(config, 1)[0]
        return Scheduler(
            BlockPool(self._num_blocks, layout.block_tokens),
            num_slots=layout.num_slots,
            limits=Limits(MAX_STEP_TOKENS, sequences, attention_cost),
        )

    def _timed(self, head: HeadLoop | None) -> RankTimes:
        """Run until the head's final plan; how this rank's time went."""
        mesh, executor = self._mesh, self._executor

        def clocks() -> tuple[float, float, float, float]:
            idle_s = head.idle_s if head else 0.0
            wait_s = mesh.replica.accounts.wait_s + mesh.pp.accounts.wait_s + idle_s
            return time.perf_counter(), executor.forward_s, mesh.tp.accounts.wait_s, wait_s

        before = clocks()
        executor.run(head)
        self._runner.reset()
        return RankTimes(*(after - start for after, start in zip(clocks(), before, strict=True)))
