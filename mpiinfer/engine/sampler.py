"""Choosing tokens from logits that are split over the shards by vocabulary, without gathering the vocabulary.

A sequence's random numbers are a hash of (its seed, position, token id), so its tokens depend on nothing else: not on
the layout, not on its neighbours in the batch. Sampling is the Gumbel maximum: argmax of logit / temperature + noise.
Every shard computes the same answer.

In this order: bias, penalties, bans (endings before min_tokens, bad words); temperature; then a token must pass top_k,
top_p, whose mass is counted among what top_k leaves, and min_p. Log probabilities are the model's own, before all that.

Shapes: S rows to sample, R of them with a temperature, V vocabulary rows of this shard, C candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mpiinfer.comm.domain import Domain
from mpiinfer.engine.sampling import Sampling

# Candidates per shard that a nucleus (top_p) is first looked for in; a wider one takes a second round over all.
NUCLEUS_CANDIDATES = 512

# Below this, sampling is greedy: the softmax has become the argmax long before, and a quotient would overflow.
MIN_TEMPERATURE = 1e-5
# Rows whose logits are held in float64 at once.
WIDE_ROWS = 32


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits: how to choose from it, and the tokens before, `num_prompt` of them the prompt's."""

    sampling: Sampling
    token_ids: Sequence[int]
    num_prompt: int

    @property
    def generated(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt :]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A chosen token, its log probability (nan when not asked for), and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]


class Sampler:
    """Samples for the shard that holds `vocabulary` rows of the head; collective over `tp`."""

    def __init__(self, vocabulary: range, vocab_size: int, tp: Domain) -> None:
        self._vocabulary = vocabulary
        self._start = vocabulary.start
        self._vocab_size = vocab_size
        self._tp = tp

    def __call__(self, logits_SV: torch.Tensor, rows: Sequence[Row]) -> list[Chosen]:
        """logits_SV float32; one `Chosen` for each row, the same on every shard."""
        edited_SV = self._edited(logits_SV, rows)
        tokens_S = self._greedy(edited_SV)
        hot = [number for number, row in enumerate(rows) if row.sampling.temperature >= MIN_TEMPERATURE]
        for first in range(0, len(hot), WIDE_ROWS):
            part = hot[first : first + WIDE_ROWS]
            tokens_S[part] = self._sample(edited_SV[part], [rows[number] for number in part])
        if all(row.sampling.logprobs < 0 for row in rows):
            return [Chosen(token, math.nan, [], []) for token in tokens_S.tolist()]
        return self.score(logits_SV, tokens_S, [row.sampling.logprobs for row in rows])

    def score(self, logits_SV: torch.Tensor, tokens_S: torch.Tensor, widths: Sequence[int]) -> list[Chosen]:
        """Given tokens, as if they had been chosen: their log probabilities, and the `widths` likeliest of each row.

        tokens_S int64. A width below 1 is none.
        """
        total_S = self._log_sum_exp(logits_SV)
        num_local = logits_SV.shape[1]
        local_S = tokens_S.to(logits_SV.device) - self._start
        mine_S = (local_S >= 0) & (local_S < num_local)
        picked_S = logits_SV.gather(1, local_S.clamp(0, num_local - 1).unsqueeze(1)).squeeze(1).double()
        chosen_S = self._tp.all_reduce(picked_S.masked_fill(~mine_S, 0.0)) - total_S
        values_SC, ids_SC = self._top(logits_SV, max(1, *widths))
        tokens, logprobs = tokens_S.tolist(), chosen_S.tolist()
        ids, top = ids_SC.tolist(), (values_SC - total_S.unsqueeze(1)).tolist()
        return [
            Chosen(tokens[row], logprobs[row], ids[row][: max(0, width)], top[row][: max(0, width)])
            for row, width in enumerate(widths)
        ]

    # ---- logits as a row's sampling wants them

    def _edited(self, logits_SV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        if not any(row.sampling.edits_logits for row in rows):
            return logits_SV
        edited_SV = logits_SV.clone()
        for logits_V, row in zip(edited_SV, rows, strict=True):
            if row.sampling.edits_logits:
                self._edit(logits_V, row)
        return edited_SV

    def _edit(self, logits_V: torch.Tensor, row: Row) -> None:
        """In place, and only at the ids that matter."""
        sampling, device = row.sampling, logits_V.device
        if bias := self._mine(dict(sampling.bias).items()):
            ids, addends = zip(*bias, strict=True)
            logits_V[list(ids)] += torch.tensor(addends, device=device)
        if sampling.repetition_penalty != 1 and (seen := [id for id, _ in self._mine(Counter(row.token_ids).items())]):
            values = logits_V[seen]
            penalty = sampling.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if counted := self._mine(Counter(row.generated).items()):
            ids, counts = zip(*counted, strict=True)
            times = torch.tensor(counts, dtype=torch.float32, device=device)
            logits_V[list(ids)] -= sampling.presence_penalty + sampling.frequency_penalty * times
        if banned := [id for id, _ in self._mine((token, 0) for token in _banned(row))]:
            logits_V[banned] = -math.inf

    def _mine(self, items: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
        """Those whose id is this shard's, by its place in the shard."""
        return [(id - self._start, value) for id, value in items if id in self._vocabulary]

    # ---- the choice

    def _greedy(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """The id of the largest logit; of equal ones the smallest id. int64 [S]."""
        best_S, local_S = logits_SV.max(dim=1)
        return self._best(best_S, local_S + self._start)

    def _best(self, values_S: torch.Tensor, ids_S: torch.Tensor) -> torch.Tensor:
        """The id with the largest value over the shards. Shards are in order of id, so the first of equals wins."""
        pairs_2S = torch.stack((values_S.double(), ids_S.double()))
        gathered_P2S = self._tp.all_gather(pairs_2S)
        winner_S = gathered_P2S[:, 0].argmax(dim=0)  # nan, where there is one, wins
        if not bool(torch.isfinite(gathered_P2S[:, 0].gather(0, winner_S.unsqueeze(0))).all()):
            raise FloatingPointError(
                "the logits are not finite: the weights are damaged, or overflow in this precision (try --weights fp32)"
            )
        return gathered_P2S[:, 1].gather(0, winner_S.unsqueeze(0)).squeeze(0).long()

    def _sample(self, logits_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """Ids that the rows' temperatures, filters and seeds choose, int64 [R]."""
        samplings = [row.sampling for row in rows]
        device = logits_RV.device
        scaled_RV = logits_RV.double() / _column([sampling.temperature for sampling in samplings], device)
        ids_V = torch.arange(self._start, self._start + scaled_RV.shape[1], device=device)
        streams = [noise_stream(row.sampling.seed, len(row.token_ids)) for row in rows]
        noisy_RV = scaled_RV + gumbel(torch.tensor(streams, device=device).unsqueeze(1), ids_V)
        if any(sampling.top_k or sampling.top_p < 1 or sampling.min_p for sampling in samplings):
            noisy_RV.masked_fill_(scaled_RV < self._thresholds(scaled_RV, samplings).unsqueeze(1), -math.inf)
        best_R, local_R = noisy_RV.max(dim=1)
        return self._best(best_R, local_R + self._start)

    def _thresholds(self, scaled_RV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
        """The smallest scaled logit of each row that passes all its filters, float64 [R]."""
        device = scaled_RV.device
        wide = any(sampling.top_p < 1 and not sampling.top_k for sampling in samplings)
        width = max([1, *(sampling.top_k for sampling in samplings), NUCLEUS_CANDIDATES if wide else 0])
        top_p_R1 = _column([sampling.top_p for sampling in samplings], device)
        total_R = self._log_sum_exp(scaled_RV)
        best_RC = self._largest(scaled_RV, width)
        if wide and bool(((best_RC - total_R.unsqueeze(1)).exp().sum(dim=1, keepdim=True) < top_p_R1).any()):
            best_RC = self._largest(scaled_RV, self._vocab_size)
        places_C = torch.arange(best_RC.shape[1], device=device)
        limits_R1 = _column([sampling.top_k or best_RC.shape[1] for sampling in samplings], device)
        has_top_k_R1 = _column([float(sampling.top_k > 0) for sampling in samplings], device) > 0
        candidates_RC = best_RC.masked_fill(places_C >= limits_R1, -math.inf)
        within_R1 = torch.where(has_top_k_R1, candidates_RC.logsumexp(dim=1, keepdim=True), total_R.unsqueeze(1))
        mass_RC = (candidates_RC - within_R1).exp()
        # A candidate that begins before top_p of the mass is reached; all of them where top_p is 1.
        kept_RC = (mass_RC.cumsum(dim=1) - mass_RC < top_p_R1) | (top_p_R1 >= 1)
        kept_RC &= places_C < limits_R1
        last_R1 = kept_RC.sum(dim=1, keepdim=True).clamp(min=1) - 1
        filtered_R = torch.tensor([bool(s.top_k) or s.top_p < 1 for s in samplings], device=device)
        threshold_R = best_RC.gather(1, last_R1).squeeze(1).masked_fill(~filtered_R, -math.inf)
        min_p_R = _column([sampling.min_p for sampling in samplings], device).squeeze(1)
        return torch.maximum(threshold_R, best_RC[:, 0] + min_p_R.log())

    def _largest(self, values_RV: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` largest values of each row over all shards (or all there are), descending; exact, since each
        shard gives its own `count` largest."""
        width = min(count, self._vocab_size)
        local = values_RV.topk(min(width, values_RV.shape[1]), dim=1).values
        padded = torch.full((values_RV.shape[0], width), -math.inf, dtype=values_RV.dtype, device=values_RV.device)
        padded[:, : local.shape[1]] = local
        merged_RM = self._tp.all_gather(padded).permute(1, 0, 2).flatten(1)
        return merged_RM.topk(width, dim=1).values

    def _log_sum_exp(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """log of the sum over the whole vocabulary of exp(logit), float64 [S]."""
        local_S = torch.cat([torch.logsumexp(part.double(), dim=1) for part in torch.split(logits_SV, WIDE_ROWS)])
        return torch.logsumexp(self._tp.all_gather(local_S), dim=0)

    # ---- log probabilities

    def _top(self, logits_SV: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `width` largest logits over all shards and their ids: float64 and int64 [S, width]."""
        num_rows = logits_SV.shape[0]
        local = logits_SV.topk(min(width, logits_SV.shape[1]), dim=1)
        pairs_2SC = torch.full((2, num_rows, width), -math.inf, dtype=torch.float64, device=logits_SV.device)
        pairs_2SC[0, :, : local.values.shape[1]] = local.values.double()
        pairs_2SC[1, :, : local.values.shape[1]] = (local.indices + self._start).double()
        gathered_P2SC = self._tp.all_gather(pairs_2SC)
        values_SM = gathered_P2SC[:, 0].permute(1, 0, 2).flatten(1)
        ids_SM = gathered_P2SC[:, 1].permute(1, 0, 2).flatten(1)
        best = values_SM.topk(min(width, values_SM.shape[1]), dim=1)
        return best.values, ids_SM.gather(1, best.indices).long()


def _banned(row: Row) -> list[int]:
    """Ids that may not come next."""
    sampling, generated = row.sampling, row.generated
    banned = list(sampling.endings) if len(generated) < sampling.min_tokens else []
    for word in sampling.bad_words:
        before = len(word) - 1
        if before <= len(generated) and list(generated[len(generated) - before :]) == word[:-1]:
            banned.append(word[-1])
    return banned


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """float64 [R, 1]."""
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)


def noise_stream(seed: int, position: int) -> int:
    """Names the noise of one position of a sequence, as a signed 64-bit number."""
    return _as_int64(_mix_int(_mix_int(seed & _MASK64) ^ (position & _MASK64)))


def gumbel(stream: torch.Tensor | int, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for each token id (int64), float64: a pure function of (stream, id)."""
    bits = _mix(ids.to(torch.int64) + stream)
    # 52 high bits, centred in their cells: never 0 and never 1.
    uniform = ((_shift_right(bits, 12)).double() + 0.5) / float(1 << 52)
    return -torch.log(-torch.log(uniform))


# The finaliser of splitmix64 (Steele, Lea and Flood, 2014), on int64 tensors whose products wrap, and on Python ints.
_MASK64 = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x * _as_int64(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _as_int64(_FIRST)
    x = (x ^ _shift_right(x, 27)) * _as_int64(_SECOND)
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK64
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK64
    return x ^ (x >> 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
