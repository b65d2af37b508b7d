"""Grouped-query attention of one shard over the keys and values in its stage's cache.

Cost is linear in a sequence's own length, never in the longest of the batch: tokens of a step are flat, and each
sequence attends on its own. The kernels read the cache where it lies and never copy keys and values to match query
heads; the torch forms beside them say what they compute, and are used on GPUs and where nothing was compiled.

Shapes: T tokens of the step, n tokens of one sequence, L its positions with these, Q local query heads, K local
key/value heads, G query heads a key/value head, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from mpiinfer.model.batch import Batch
from mpiinfer.model.cache import BlockCache
from mpiinfer.model.kernels import Library, library
from mpiinfer.model.layers import ColumnLinear, RowLinear, rms_norm
from mpiinfer.model.rotary import Rotation
from mpiinfer.model.shard import HeadShard

# Queries of a chunk are masked in groups of this many, which bounds the mask to this x L.
MASKED_QUERIES = 256
# The kernels load this many tokens of a block at once.
KERNEL_TOKENS = 16


@dataclass(frozen=True)
class HeadNorms:
    """Norms of each query and key head (Qwen3)."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float

    def __call__(self, q_TQd: torch.Tensor, k_TKd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(q_TQd, self.q_weight, self.eps), rms_norm(k_TKd, self.k_weight, self.eps)


class Attention:
    """The attention of one layer. `layer` is its index in the stage's cache; `window` in tokens, or None."""

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

    def __call__(self, x_TD: torch.Tensor, batch: Batch, rotation: Rotation, cache: BlockCache) -> torch.Tensor:
        num_heads = len(self.heads.queries) + 2 * len(self.heads.kv)
        heads_THd = self.qkv(x_TD).view(x_TD.shape[0], num_heads, self.head_dim)
        kernels = library()
        if kernels is not None and _suits_kernels(cache):
            return self.output(self.attend_by_kernel(kernels, heads_THd, batch, rotation, cache))
        return self.output(self.attend(heads_THd, batch, rotation, cache))

    def attend(self, heads_THd: torch.Tensor, batch: Batch, rotation: Rotation, cache: BlockCache) -> torch.Tensor:
        """Queries, keys and values (H = Q + 2 K) to the mixed values, [T, Q d]; keys and values go into the cache."""
        num_q, num_kv = len(self.heads.queries), len(self.heads.kv)
        q_TQd, k_TKd = heads_THd[:, :num_q], heads_THd[:, num_q : num_q + num_kv]
        v_TKd = heads_THd[:, num_q + num_kv :]
        if self.norms is not None:
            q_TQd, k_TKd = self.norms(q_TQd, k_TKd)
        q_TQd, k_TKd = rotation(q_TQd), rotation(k_TKd)
        cache.store(self.layer, batch.slots, k_TKd, v_TKd)
        mixed_TQd = torch.empty_like(q_TQd)
        for first, start, num_tokens, table in batch.segments.tolist():
            rows, stop = slice(first, first + num_tokens), start + num_tokens
            blocks = batch.tables[table : table - (-stop // cache.block_tokens)].to(q_TQd.device)
            k_KLd, v_KLd = cache.read(self.layer, blocks, stop)
            mixed_TQd[rows] = self._attend_one(q_TQd[rows], k_KLd, v_KLd, start)
        return mixed_TQd.flatten(1)

    def attend_by_kernel(
        self, kernels: Library, heads_THd: torch.Tensor, batch: Batch, rotation: Rotation, cache: BlockCache
    ) -> torch.Tensor:
        """What `attend` computes, in place of `heads_THd`."""
        num_q, num_kv = len(self.heads.queries), len(self.heads.kv)
        num_tokens, num_heads, head_dim = heads_THd.shape
        keys, values = cache.keys[self.layer].data_ptr(), cache.values[self.layer].data_ptr()
        kernels.rotate_and_store(
            heads_THd.data_ptr(),
            rotation.cos_Th.data_ptr(),
            rotation.sin_Th.data_ptr(),
            batch.slots.data_ptr(),
            self.norms.q_weight.data_ptr() if self.norms else None,
            self.norms.k_weight.data_ptr() if self.norms else None,
            keys,
            values,
            num_tokens,
            num_q,
            num_kv,
            head_dim,
            cache.block_tokens,
            self.norms.eps if self.norms else 0.0,
        )
        mixed_TD = torch.empty((num_tokens, num_q * head_dim))
        kernels.attend(
            heads_THd.data_ptr(),
            keys,
            values,
            mixed_TD.data_ptr(),
            batch.segments.data_ptr(),
            batch.tables.data_ptr(),
            batch.segments.shape[0],
            num_heads * head_dim,
            num_q,
            num_kv,
            self.heads.queries.start - self.heads.kv.start * self.heads.group_size,
            self.heads.group_size,
            head_dim,
            cache.block_tokens,
            self.window or 0,
            head_dim**-0.5,
            torch.get_num_threads(),
        )
        return mixed_TD

    def _attend_one(self, q_nQd: torch.Tensor, k_KLd: torch.Tensor, v_KLd: torch.Tensor, start: int) -> torch.Tensor:
        """Attention of n tokens from position `start` on to all L = start + n of their sequence: [n, Q, d]."""
        num_tokens = q_nQd.shape[0]
        k_QLd, v_QLd = k_KLd[self._kv_of_query], v_KLd[self._kv_of_query]
        q_Qnd = q_nQd.transpose(0, 1)
        parts = [
            self._attend_masked(q_Qnd[:, first : first + MASKED_QUERIES], k_QLd, v_QLd, start + first)
            for first in range(0, num_tokens, MASKED_QUERIES)
        ]
        return torch.cat(parts, dim=1).transpose(0, 1)

    def _attend_masked(self, q_Qmd: torch.Tensor, k_QLd: torch.Tensor, v_QLd: torch.Tensor, start: int) -> torch.Tensor:
        """m queries from position `start` on, with the keys that any of them sees and a mask for the rest."""
        stop = start + q_Qmd.shape[1]
        first = max(0, start - self.window + 1) if self.window else 0
        queries_m1 = torch.arange(start, stop, device=q_Qmd.device).unsqueeze(1)
        keys_1l = torch.arange(first, stop, device=q_Qmd.device).unsqueeze(0)
        seen_ml = keys_1l <= queries_m1
        if self.window is not None:
            seen_ml &= keys_1l > queries_m1 - self.window
        mixed_Qmd = functional.scaled_dot_product_attention(
            q_Qmd.unsqueeze(0), k_QLd[None, :, first:stop], v_QLd[None, :, first:stop], attn_mask=seen_ml
        )
        return mixed_Qmd.squeeze(0)


def _suits_kernels(cache: BlockCache) -> bool:
    keys = cache.keys
    return keys.is_cpu and keys.dtype == torch.float32 and cache.block_tokens % KERNEL_TOKENS == 0
