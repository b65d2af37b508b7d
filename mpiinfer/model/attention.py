"""Grouped-query attention of one shard over the keys and values of each sequence.

Cost is linear in a sequence's own length, never in the longest of the batch: tokens of a step are flat, and each
sequence attends on its own. Keys and values are never copied to match query heads at decode.

Shapes: T tokens of the step, n tokens of one sequence, L its cached length with these, Q local query heads, K local
key/value heads, G query heads a key/value head, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from mpiinfer.model.layers import ColumnLinear, RowLinear, rms_norm
from mpiinfer.model.rotary import Rotation
from mpiinfer.model.shard import HeadShard

# Queries of a chunk that looks back are masked in groups of this many, which bounds the mask to this x L.
MASKED_QUERIES = 256


class BlockCache:
    def __init__(self, num_layers, num_kv_heads, num_blocks, block_tokens, head_dim, dtype, device) -> None:
        shape = (num_layers, num_blocks, block_tokens, num_kv_heads, head_dim)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self.block_tokens = block_tokens

    def append(self, layer, segment, k_nKd, v_nKd):
        p = torch.arange(segment.start, segment.start + segment.num_tokens)
        table = torch.tensor(segment.blocks)
        self._keys[layer, table[p // self.block_tokens], p % self.block_tokens] = k_nKd
        self._values[layer, table[p // self.block_tokens], p % self.block_tokens] = v_nKd

    def read(self, layer, segment):
        stop = segment.start + segment.num_tokens
        table = torch.tensor(segment.blocks)[: -(-stop // self.block_tokens)]
        k = self._keys[layer, table].flatten(0, 1)[:stop].transpose(0, 1)
        v = self._values[layer, table].flatten(0, 1)[:stop].transpose(0, 1)
        return k, v


@dataclass(frozen=True, slots=True)
class Segment:
    blocks: list
    first: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    sample_rows: torch.Tensor

    @staticmethod
    def of(token_ids, segments, sample_rows, device):
        positions = [p for s in segments for p in range(s.start, s.start + s.num_tokens)]
        return Batch(torch.tensor(token_ids), torch.tensor(positions), tuple(segments), torch.tensor(sample_rows, dtype=torch.int64))


@dataclass(frozen=True)
class HeadNorms:
    """Norms of each query and key head (Qwen3)."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float

    def __call__(self, q_TQd: torch.Tensor, k_TKd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(q_TQd, self.q_weight, self.eps), rms_norm(k_TKd, self.k_weight, self.eps)


class Attention:
    """The attention of one layer. `layer` is its index in the stage's caches; `window` in tokens, or None."""

    def __init__(
        self,
        qkv: ColumnLinear,
        output: RowLinear,
        norms: HeadNorms | None,
        heads: HeadShard,
        head_dim: int,
        layer: int,
        window: int | None,
        device: torch.device,
    ) -> None:
        self.qkv = qkv
        self.output = output
        self.norms = norms
        self.heads = heads
        self.head_dim = head_dim
        self.layer = layer
        self.window = window
        self._kv_of_query = torch.tensor(heads.kv_of_query, device=device)

    def __call__(self, x_TD, batch, rotation, cache) -> torch.Tensor:
        num_q, num_kv = len(self.heads.queries), len(self.heads.kv)
        heads_THd = self.qkv(x_TD).view(x_TD.shape[0], num_q + 2 * num_kv, self.head_dim)
        q_TQd, k_TKd = heads_THd[:, :num_q], heads_THd[:, num_q : num_q + num_kv]
        v_TKd = heads_THd[:, num_q + num_kv :]
        if self.norms is not None:
            q_TQd, k_TKd = self.norms(q_TQd, k_TKd)
        q_TQd, k_TKd = rotation(q_TQd), rotation(k_TKd)
        mixed_TQd = torch.empty_like(q_TQd)
        for segment in batch.segments:
            rows = slice(segment.first, segment.first + segment.num_tokens)
            cache.append(self.layer, segment, k_TKd[rows], v_TKd[rows])
        for segment in batch.segments:
            rows = slice(segment.first, segment.first + segment.num_tokens)
            k_KLd, v_KLd = cache.read(self.layer, segment)
            mixed_TQd[rows] = self._attend(q_TQd[rows], k_KLd, v_KLd, segment.start)
        return self.output(mixed_TQd.flatten(1))

    def _attend(self, q_nQd: torch.Tensor, k_KLd: torch.Tensor, v_KLd: torch.Tensor, start: int) -> torch.Tensor:
        """Attention of n tokens from position `start` on to all L = start + n of their sequence: [n, Q, d]."""
        num_tokens, length = q_nQd.shape[0], k_KLd.shape[1]
        if num_tokens == 1:
            first = max(0, length - self.window) if self.window else 0
            return self._attend_one(q_nQd[0], k_KLd[:, first:], v_KLd[:, first:]).unsqueeze(0)
        k_QLd, v_QLd = k_KLd[self._kv_of_query], v_KLd[self._kv_of_query]
        q_Qnd = q_nQd.transpose(0, 1)
        if start == 0 and (self.window is None or length <= self.window):
            return _attention(q_Qnd, k_QLd, v_QLd, is_causal=True).transpose(0, 1)
        parts = [
            self._attend_masked(q_Qnd[:, first : first + MASKED_QUERIES], k_QLd, v_QLd, start + first)
            for first in range(0, num_tokens, MASKED_QUERIES)
        ]
        return torch.cat(parts, dim=1).transpose(0, 1)

    def _attend_one(self, q_Qd: torch.Tensor, k_KLd: torch.Tensor, v_KLd: torch.Tensor) -> torch.Tensor:
        """One token: the query heads of a key/value head are rows of one product with its keys, [Q, d].

        A shard whose heads end inside a group leaves the other rows of that group zero.
        """
        num_q, head_dim = q_Qd.shape
        before = self.heads.queries.start - self.heads.kv.start * self.heads.group_size
        after = len(self.heads.kv) * self.heads.group_size - before - num_q
        if before or after:
            q_Qd = functional.pad(q_Qd, (0, 0, before, after))
        q_KGd = q_Qd.view(len(self.heads.kv), self.heads.group_size, head_dim)
        mixed_Qd = _attention(q_KGd, k_KLd, v_KLd).reshape(-1, head_dim)
        return mixed_Qd[before : before + num_q]

    def _attend_masked(self, q_Qmd: torch.Tensor, k_QLd: torch.Tensor, v_QLd: torch.Tensor, start: int) -> torch.Tensor:
        """m queries from position `start` on, with the keys that any of them sees and a mask for the rest."""
        stop = start + q_Qmd.shape[1]
        first = max(0, start - self.window + 1) if self.window else 0
        queries_m1 = torch.arange(start, stop, device=q_Qmd.device).unsqueeze(1)
        keys_1l = torch.arange(first, stop, device=q_Qmd.device).unsqueeze(0)
        seen_ml = keys_1l <= queries_m1
        if self.window is not None:
            seen_ml &= keys_1l > queries_m1 - self.window
        return _attention(q_Qmd, k_QLd[:, first:stop], v_QLd[:, first:stop], mask=seen_ml)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None, is_causal: bool = False
) -> torch.Tensor:
    """torch's fused attention; it wants a batch dim in front."""
    mixed = functional.scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, is_causal=is_causal
    )
    return mixed.squeeze(0)
