"""Choosing tokens from logits that are split over the shards by vocabulary, without gathering the vocabulary.

A sequence's random numbers are a hash of (its seed, position, token id), so its tokens depend on nothing else: not on
the layout, not on its neighbours in the batch. Sampling is the Gumbel maximum: argmax of logit / temperature + noise.
Every shard computes the same answer.

Shapes: S rows to sample, V vocabulary rows of this shard, C candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mpiinfer.comm.domain import Domain

# Candidates per shard that a nucleus (top_p) is first looked for in; a wider one takes a second round over all.
NUCLEUS_CANDIDATES = 512

# Below this, sampling is greedy: the softmax has become the argmax long before, and a quotient would overflow.
MIN_TEMPERATURE = 1e-5
# Rows whose logits are held in float64 at once.
WIDE_ROWS = 32


@dataclass(frozen=True, slots=True)
class Choice:
    """How one row is sampled. position: number of tokens before the one to choose. logprobs: as in the plan."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int
    logprobs: int


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
        self._start = vocabulary.start
        self._vocab_size = vocab_size
        self._tp = tp

    def __call__(self, logits_SV, rows):
        choices = [Choice(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p, r.sampling.seed, len(r.token_ids), r.sampling.logprobs) for r in rows]
        return self._old(logits_SV, choices)

    def _old(self, logits_SV: torch.Tensor, choices: list[Choice]) -> list[Chosen]:
        """logits_SV float32; one `Chosen` for each row, the same on every shard."""
        tokens_S = self._greedy(logits_SV)
        for row, choice in enumerate(choices):
            if choice.temperature >= MIN_TEMPERATURE:
                tokens_S[row] = self._sample(logits_SV[row], choice)
        tokens = tokens_S.tolist()
        if all(choice.logprobs < 0 for choice in choices):
            return [Chosen(token, math.nan, [], []) for token in tokens]
        return self._with_logprobs(logits_SV, tokens_S, choices)

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

    def _sample(self, logits_V: torch.Tensor, choice: Choice) -> int:
        scaled_V = logits_V.double() / choice.temperature
        ids_V = torch.arange(self._start, self._start + scaled_V.shape[0], device=scaled_V.device)
        if choice.top_k > 0 or choice.top_p < 1:
            threshold = self._threshold(scaled_V, choice)
            kept_V = scaled_V >= threshold
            scaled_V, ids_V = scaled_V[kept_V], ids_V[kept_V]
        noisy_V = scaled_V + gumbel(choice.seed, choice.position, ids_V)
        if noisy_V.shape[0] == 0:
            best, token = torch.full((1,), -math.inf, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        else:
            index = noisy_V.argmax()
            best, token = noisy_V[index].reshape(1).cpu(), ids_V[index].reshape(1).cpu()
        return int(self._best(best.to(logits_V.device), token.to(logits_V.device)))

    def _threshold(self, scaled_V: torch.Tensor, choice: Choice) -> float:
        """The smallest scaled logit that top_k lets through, and then top_p among those."""
        if choice.top_k:
            best_C = self._largest(scaled_V, choice.top_k)
            return _nucleus(best_C, torch.logsumexp(best_C, dim=0), choice.top_p)
        total = self._log_sum_exp(scaled_V.unsqueeze(0)).squeeze(0)
        best_C = self._largest(scaled_V, NUCLEUS_CANDIDATES)
        if float((best_C - total).exp().sum()) < choice.top_p:
            best_C = self._largest(scaled_V, self._vocab_size)
        return _nucleus(best_C, total, choice.top_p)

    def _largest(self, values_V: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` largest values over all shards (or all there are), descending; exact, since each shard gives
        its own `count` largest."""
        width = min(count, self._vocab_size)
        local = values_V.topk(min(width, values_V.shape[0])).values
        padded = torch.full((width,), -math.inf, dtype=values_V.dtype, device=values_V.device)
        padded[: local.shape[0]] = local
        merged = self._tp.all_gather(padded).flatten()
        return merged.topk(width).values

    def _log_sum_exp(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """log of the sum over the whole vocabulary of exp(logit), float64 [S]."""
        local_S = torch.cat([torch.logsumexp(part.double(), dim=1) for part in torch.split(logits_SV, WIDE_ROWS)])
        return torch.logsumexp(self._tp.all_gather(local_S), dim=0)

    def _with_logprobs(self, logits_SV: torch.Tensor, tokens_S: torch.Tensor, choices: list[Choice]) -> list[Chosen]:
        total_S = self._log_sum_exp(logits_SV)
        num_rows, num_local = logits_SV.shape
        local_S = tokens_S.to(logits_SV.device) - self._start
        mine_S = (local_S >= 0) & (local_S < num_local)
        picked_S = logits_SV.gather(1, local_S.clamp(0, num_local - 1).unsqueeze(1)).squeeze(1).double()
        chosen_S = self._tp.all_reduce(picked_S.masked_fill(~mine_S, 0.0)) - total_S
        width = max(choice.logprobs for choice in choices)
        values_SC, ids_SC = self._top(logits_SV, max(1, width))
        top_SC = values_SC - total_S.unsqueeze(1)
        tokens, logprobs = tokens_S.tolist(), chosen_S.tolist()
        return [
            Chosen(
                tokens[row],
                logprobs[row],
                ids_SC[row, : max(0, choices[row].logprobs)].tolist(),
                top_SC[row, : max(0, choices[row].logprobs)].tolist(),
            )
            for row in range(num_rows)
        ]

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


def _nucleus(best_C: torch.Tensor, total: torch.Tensor, top_p: float) -> float:
    """The last of the descending logits `best_C` that starts before `top_p` of the mass exp(total) is reached."""
    if top_p >= 1:
        return float(best_C[-1])
    mass_C = (best_C - total).exp()
    kept = int((mass_C.cumsum(0) - mass_C < top_p).sum())
    return float(best_C[max(kept, 1) - 1])


def gumbel(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for each token id (int64), float64: a pure function of (seed, position, id)."""
    stream = _mix_int(_mix_int(seed & _MASK64) ^ (position & _MASK64))
    bits = _mix(ids.to(torch.int64) + _as_int64(stream))
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


@dataclass(frozen=True, slots=True)
class Row:
    sampling: object
    token_ids: list
    num_prompt: int
