"""`Runner`: what one rank does with a step: plan to tensors, through its stage, and on the last stage to samples.

Keeps the sequences that plans have named, each with its tokens and its table of blocks; knows nothing of requests,
texts or policy. A plan's tensors are made when it is heard, before the activation that it waits for arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpiinfer.comm.domain import Domain
from mpiinfer.engine.sampler import Chosen, Row, Sampler
from mpiinfer.engine.sampling import Sampling
from mpiinfer.engine.step import VERSION, Chunk, PromptScore, Sample, StepPlan, StepResult, decode_plan, encode
from mpiinfer.model.batch import Batch, Segment
from mpiinfer.model.stage import Stage


@dataclass(slots=True, eq=False)
class _Sequence:
    token_ids: list[int]
    num_prompt: int
    blocks: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class _Scored:
    """A position of a prompt whose token's log probability is wanted."""

    sequence: int
    position: int
    token: int
    width: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan that was heard: its tensors, whose logits are of the sequences in `sampled`, then of those in `scored`."""

    batch: Batch
    sampled: list[tuple[int, _Sequence]]
    scored: list[_Scored]


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
        first = len(step.sampled)
        samples = [
            Sample(sequence, *_values(chosen))
            for (sequence, _), chosen in zip(step.sampled, self._chosen(logits_SV[:first], step), strict=True)
        ]
        scores = [
            PromptScore(of.sequence, of.position, *_values(score)[1:])
            for of, score in zip(step.scored, self._scores(logits_SV[first:], step), strict=True)
        ]
        return encode(StepResult(VERSION, plan.number, samples, scores))

    def _chosen(self, logits_SV: torch.Tensor, step: _Step) -> list[Chosen]:
        rows = [Row(of.sampling, of.token_ids, of.num_prompt) for _, of in step.sampled]
        return self._sampler(logits_SV, rows) if rows else []

    def _scores(self, logits_SV: torch.Tensor, step: _Step) -> list[Chosen]:
        if not step.scored:
            return []
        tokens_S = torch.tensor([of.token for of in step.scored])
        return self._sampler.score(logits_SV, tokens_S, [of.width for of in step.scored])

    def _prepared(self, plan: StepPlan) -> _Step:
        """The step's tokens, flat: each sequence's after the last one's, no padding."""
        block_tokens = self._stage.cache.block_tokens
        token_ids: list[int] = []
        segments: list[Segment] = []
        sample_rows: list[int] = []
        score_rows: list[int] = []
        sampled: list[tuple[int, _Sequence]] = []
        scored: list[_Scored] = []
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
            if sequence.sampling.prompt_logprobs >= 0:
                of_chunk = _scored(chunk, sequence)
                score_rows += range(segments[-1].first, segments[-1].first + len(of_chunk))
                scored += of_chunk
        batch = Batch.of(token_ids, segments, sample_rows + score_rows, block_tokens, self._stage.device)
        return _Step(batch, sampled, scored)


def _scored(chunk: Chunk, sequence: _Sequence) -> list[_Scored]:
    """What the logits of the chunk's first tokens say of the prompt: each is about the token after it."""
    stop = min(chunk.start + chunk.num_tokens + 1, sequence.num_prompt)
    width = sequence.sampling.prompt_logprobs
    return [
        _Scored(chunk.sequence, position, sequence.token_ids[position], width)
        for position in range(chunk.start + 1, stop)
    ]


def _values(chosen: Chosen) -> tuple[int, float, list[int], list[float]]:
    return chosen.token, chosen.logprob, chosen.top_tokens, chosen.top_logprobs
