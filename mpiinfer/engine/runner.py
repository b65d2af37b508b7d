"""`Runner`: what one rank does with a step: plan to tensors, through its stage, and on the last stage to samples.

Keeps the sequences that plans have named, each with its cache; knows nothing of requests, texts or policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mpiinfer.comm.domain import Domain
from mpiinfer.engine.sampler import Choice, Sampler
from mpiinfer.engine.step import VERSION, Chunk, NewSequence, Sample, StepPlan, StepResult, decode_plan, encode
from mpiinfer.model.attention import Batch, Segment, SequenceCache
from mpiinfer.model.stage import Stage


@dataclass(frozen=True, slots=True)
class _Sequence:
    new: NewSequence
    cache: SequenceCache


class Runner:
    """Executes plans on `stage`. Implements the executor's `Worker`."""

    def __init__(self, stage: Stage, tp: Domain) -> None:
        self._stage = stage
        self._sampler = Sampler(stage.vocabulary, stage.config.vocab_size, tp)
        self._sequences: dict[int, _Sequence] = {}
        self.step = -1

    def accept(self, data: bytes) -> StepPlan:
        """Decode the next plan; forget and begin the sequences that it says."""
        plan = decode_plan(data)
        if plan.number != self.step + 1:
            raise RuntimeError(f"step {plan.number} came after step {self.step}")
        self.step = plan.number
        for sequence in plan.freed:
            del self._sequences[sequence]
        for new in plan.new:
            self._sequences[new.sequence] = _Sequence(new, self._stage.new_cache(new.capacity))
        return plan

    def reset(self) -> None:
        """Forget everything: a run has ended."""
        self._sequences.clear()
        self.step = -1

    def new_hidden(self, num_tokens: int) -> torch.Tensor:
        return self._stage.new_hidden(num_tokens)

    @torch.inference_mode()
    def forward(self, plan: StepPlan, hidden_TD: torch.Tensor | None, between: Callable[[], None]) -> torch.Tensor:
        return self._stage(self._batch(plan), hidden_TD, between)

    @torch.inference_mode()
    def finish(self, plan: StepPlan, hidden_TD: torch.Tensor | None, between: Callable[[], None]) -> bytes:
        logits_SV = self._stage(self._batch(plan), hidden_TD, between)
        sampled = [chunk for chunk in plan.chunks if chunk.samples]
        samples = list(self._samples(logits_SV, sampled)) if sampled else []
        return encode(StepResult(VERSION, plan.number, samples))

    def _samples(self, logits_SV: torch.Tensor, sampled: list[Chunk]) -> Iterator[Sample]:
        choices = [self._choice(chunk) for chunk in sampled]
        for chunk, chosen in zip(sampled, self._sampler(logits_SV, choices), strict=True):
            yield Sample(chunk.sequence, chosen.token, chosen.logprob, chosen.top_tokens, chosen.top_logprobs)

    def _choice(self, chunk: Chunk) -> Choice:
        new = self._sequences[chunk.sequence].new
        position = chunk.start + chunk.num_tokens
        return Choice(new.temperature, new.top_k, new.top_p, new.seed, position, new.logprobs)

    def _batch(self, plan: StepPlan) -> Batch:
        """The step's tokens, flat: each sequence's after the last one's, no padding."""
        token_ids: list[int] = []
        positions: list[int] = []
        sample_rows: list[int] = []
        segments: list[Segment] = []
        for chunk in plan.chunks:
            sequence = self._sequences[chunk.sequence]
            stop = chunk.start + chunk.num_tokens
            segments.append(Segment(sequence.cache, len(token_ids), chunk.start, chunk.num_tokens))
            in_prompt = chunk.token < 0
            token_ids += sequence.new.prompt[chunk.start : stop] if in_prompt else [chunk.token]
            positions += range(chunk.start, stop)
            if chunk.samples:
                sample_rows.append(len(token_ids) - 1)
        device = self._stage.device
        rotation = self._stage.rotation(torch.tensor(positions, device=device))
        ids_T = torch.tensor(token_ids, device=device)
        return Batch(ids_T, tuple(segments), torch.tensor(sample_rows, dtype=torch.int64, device=device), rotation)
