"""`BlockCache`: keys and values of all layers of a stage, in blocks that any sequence may be given.

Keys lie with the tokens of a block side by side, since a query is multiplied with many tokens at once; values with the
elements of a token side by side, since tokens are added up.

Shapes: B blocks of b tokens, K local key/value heads, d head_dim, T tokens of the step, L positions of one sequence.
"""

from __future__ import annotations

import torch

# The kernels may read this many numbers beyond the last one.
_MARGIN = 64


class BlockCache:
    """Allocated once. keys [layers, B, K, d, b], values [layers, B, K, b, d]: contiguous."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        size = num_layers * num_blocks * num_kv_heads * head_dim * block_tokens
        shape = (num_layers, num_blocks, num_kv_heads)
        self.keys, self.values = (
            torch.empty(size + _MARGIN, dtype=dtype, device=device)[:size].view(*shape, *block)
            for block in ((head_dim, block_tokens), (block_tokens, head_dim))
        )

    def store(self, layer: int, slots_T: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor) -> None:
        """Put each token's key and value into its slot."""
        blocks, offsets = slots_T // self.block_tokens, slots_T % self.block_tokens
        self.keys[layer, blocks, :, :, offsets] = k_TKd
        self.values[layer, blocks, :, offsets] = v_TKd

    def read(self, layer: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of the first `length` positions in the blocks `table`: [K, L, d] each."""
        keys = self.keys[layer, table].permute(1, 0, 3, 2).flatten(1, 2)
        values = self.values[layer, table].transpose(0, 1).flatten(1, 2)
        return keys[:, :length], values[:, :length]
