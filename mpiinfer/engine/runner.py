"""`Runner`: what one rank does with a step: plan to tensors, through its stage, and on the last stage to samples.

Keeps the sequences that plans have named, each with its tokens and its table of blocks; knows nothing of requests,
texts or policy. A plan's tensors are made when it is heard, before the activation that it waits for arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mpiinfer.comm.domain import Domain
from mpiinfer.engine.sampler import Row, Sampler
from mpiinfer.engine.sampling import Sampling
from mpiinfer.engine.step import VERSION, Sample, StepPlan, StepResult, decode_plan, encode
from mpiinfer.model.batch import Batch, Segment
from mpiinfer.model.stage import Stage


@dataclass(slots=True, eq=False)
class _Sequence:
    token_ids: list[int]
    num_prompt: int
    blocks: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan that was heard: its tensors, and the sequences whose next tokens it chooses."""

    batch: Batch
    sampled: list[tuple[int, _Sequence]]


class Runner:
    """Executes plans on `stage`. Implements the executor's `Worker`."""

    def __init__(self, stage: Stage, tp: Domain) -> None:
        self._stage = stage
        self._sampler = Sampler(stage.vocabulary, stage.config.vocab_size, tp)
        self._sequences: dict[int, _Sequence] = {}
        self._steps: dict[int, _Step] = {}
        self.step = -1

    def accept(self, data: bytes) -> StepPlan:
        """Decode the next plan; forget, begin and extend the sequences that it says."""
        plan = decode_plan(data)
        if plan.number != self.step + 1:
            raise RuntimeError(f"step {plan.number} came after step {self.step}")
        self.step = plan.number
        for sequence in plan.freed:
            del self._sequences[sequence]
        for new in plan.new:
            self._sequences[new.sequence] = _Sequence(new.token_ids, new.num_prompt, new.blocks, new.sampling)
        if plan.chunks:
            self._steps[plan.number] = self._prepared(plan)
        return plan

    def reset(self) -> None:
        """Forget everything: a run has ended."""
        self._sequences.clear()
        self._steps.clear()
        self.step = -1

    def new_hidden(self, num_tokens: int) -> torch.Tensor:
        return self._stage.new_hidden(num_tokens)

    @torch.inference_mode()
    def forward(self, plan: StepPlan, hidden_TD: torch.Tensor | None, between: Callable[[], None]) -> torch.Tensor:
        return self._stage(self._steps.pop(plan.number).batch, hidden_TD, between)

    @torch.inference_mode()
    def finish(self, plan: StepPlan, hidden_TD: torch.Tensor | None, between: Callable[[], None]) -> bytes:
        step = self._steps.pop(plan.number)
        logits_SV = self._stage(step.batch, hidden_TD, between)
        samples = list(self._samples(logits_SV, step)) if step.sampled else []
        return encode(StepResult(VERSION, plan.number, samples))

    def _samples(self, logits_SV: torch.Tensor, step: _Step) -> Iterator[Sample]:
        rows = [Row(of.sampling, of.token_ids, of.num_prompt) for _, of in step.sampled]
        for (sequence, _), chosen in zip(step.sampled, self._sampler(logits_SV, rows), strict=True):
            yield Sample(sequence, chosen.token, chosen.logprob, chosen.top_tokens, chosen.top_logprobs)

    def _prepared(self, plan: StepPlan) -> _Step:
        """The step's tokens, flat: each sequence's after the last one's, no padding."""
        block_tokens = self._stage.cache.block_tokens
        token_ids: list[int] = []
        segments: list[Segment] = []
        sample_rows: list[int] = []
        sampled: list[tuple[int, _Sequence]] = []
        for chunk in plan.chunks:
            sequence = self._sequences[chunk.sequence]
            sequence.blocks += chunk.blocks
            segments.append(Segment(sequence.blocks, len(token_ids), chunk.start, chunk.num_tokens))
            if chunk.token >= 0:
                sequence.token_ids.append(chunk.token)
                token_ids.append(chunk.token)
            else:
                token_ids += sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
            if chunk.samples:
                sample_rows.append(len(token_ids) - 1)
                sampled.append((chunk.sequence, sequence))
        return _Step(Batch.of(token_ids, segments, sample_rows, block_tokens, self._stage.device), sampled)
