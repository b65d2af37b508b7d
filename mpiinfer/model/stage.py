"""`Stage`: the contiguous range of layers that one rank runs, as one shard of its tensor domain.

The first stage has the embedding, the last the final norm and the head; other layers are never constructed. It is
told its layers and given its domain: it does not know how many stages there are, nor who schedules.

The stream of activations is changed in place: a layer adds to it what the one before has computed, in one pass with
the norm that comes next.

Shapes: T tokens of the step, S rows to sample, D hidden size, V local vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpiinfer.comm.domain import Domain
from mpiinfer.model.attention import Attention, HeadNorms
from mpiinfer.model.batch import Batch
from mpiinfer.model.cache import BlockCache
from mpiinfer.model.config import ModelConfig
from mpiinfer.model.formats import DenseWeight, LinearWeight, Weight
from mpiinfer.model.layers import ColumnLinear, GatedMlp, RowLinear, VocabularyEmbedding, add_rms_norm, rms_norm
from mpiinfer.model.manifest import Parameter, stage_manifest
from mpiinfer.model.rotary import Rotation, frequencies
from mpiinfer.model.shard import HeadShard, columns_range


@dataclass(frozen=True)
class Layer:
    """Attention and MLP, each added to the stream after its norm."""

    attention_norm: torch.Tensor
    attention: Attention
    mlp_norm: torch.Tensor
    mlp: GatedMlp
    eps: float

    def __call__(
        self,
        stream_TD: torch.Tensor,
        update_TD: torch.Tensor | None,
        batch: Batch,
        rotation: Rotation,
        cache: BlockCache,
    ) -> torch.Tensor:
        """What the layer's MLP adds to the stream, [T, D]. The stream takes in `update_TD` and the attention's part."""
        x_TD = add_rms_norm(stream_TD, update_TD, self.attention_norm, self.eps)
        x_TD = add_rms_norm(stream_TD, self.attention(x_TD, batch, rotation, cache), self.mlp_norm, self.eps)
        return self.mlp(x_TD)


class Stage:
    """`layers` of the model as shard `tp.rank` of `tp.size`, with weights allocated and yet to be filled."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        tp: Domain,
        dtype: torch.dtype,
        device: torch.device,
        new_weight: Callable[[Parameter], Weight] | None = None,
    ) -> None:
        """dtype: of activations. new_weight: allocates a parameter in its format (default: all in `dtype`)."""
        self.config = config
        self.layers = layers
        self.dtype = dtype
        self.device = device
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        self.manifest: tuple[Parameter, ...] = stage_manifest(config, layers, tp.rank, tp.size)
        allocate = new_weight or (lambda parameter: DenseWeight(parameter.shape, dtype, device))
        self.weights = {parameter.name: allocate(parameter) for parameter in self.manifest}
        self.vocabulary = columns_range(config.vocab_size, tp.rank, tp.size)
        self._tp = tp
        self._heads = HeadShard.of(config.num_heads, config.num_kv_heads, tp.rank, tp.size)
        self._frequencies = frequencies(config.rope, config.head_dim).to(device)
        self._layers = [self._build_layer(layer) for layer in layers]
        self._embedding = VocabularyEmbedding(self._matrix("embedding"), self.vocabulary, tp) if self.is_first else None
        self._norm = self._values("norm")
        self._head: LinearWeight | None = None
        if self.is_last:
            self._head = self._matrix("embedding" if config.tied_embeddings else "head")

    @property
    def num_bytes(self) -> int:
        """Bytes of weights held."""
        return sum(weight.num_bytes for weight in self.weights.values())

    @property
    def weight_formats(self) -> str:
        """What its matrices are held in: "fp32", or "int4+int8"."""
        return "+".join(sorted({weight.format for weight in self.weights.values() if len(weight.shape) == 2}))

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes on this rank."""
        return len(self.layers) * self._heads.cache_width(self.config.head_dim) * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int, block_tokens: int) -> None:
        """Make room for keys and values. To be called once, before the stage runs."""
        self.cache = BlockCache(
            len(self.layers),
            len(self._heads.kv),
            self.config.head_dim,
            num_blocks,
            block_tokens,
            self.dtype,
            self.device,
        )

    def new_hidden(self, num_tokens: int) -> torch.Tensor:
        """An empty activation [T, D], as it travels between stages."""
        return torch.empty((num_tokens, self.config.hidden_size), dtype=self.dtype, device=self.device)

    def __call__(
        self, batch: Batch, hidden_TD: torch.Tensor | None, between: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """Run the layers. `hidden_TD` comes from the stage before (None on the first); `between` is called after each.

        Returns [T, D] for the next stage, or on the last stage the logits of this shard's vocabulary, float32 [S, V].
        """
        rotation = Rotation(self._frequencies, batch.positions, self.dtype)
        if self._embedding is not None:
            hidden_TD = self._embedding(batch.token_ids)
        assert hidden_TD is not None
        update_TD = None
        for layer in self._layers:
            update_TD = layer(hidden_TD, update_TD, batch, rotation, self.cache)
            between()
        assert update_TD is not None
        hidden_TD += update_TD
        if self._head is None:
            return hidden_TD
        assert self._norm is not None
        hidden_SD = rms_norm(hidden_TD[batch.sample_rows], self._norm, self.config.rms_eps)
        return self._head(hidden_SD).float()

    def _build_layer(self, layer: int) -> Layer:
        def linear(part: str) -> LinearWeight:
            return self._matrix(f"layers.{layer}.{part}")

        def values(part: str) -> torch.Tensor | None:
            return self._values(f"layers.{layer}.{part}")

        config, tp = self.config, self._tp
        attention_norm, mlp_norm = values("attention_norm"), values("mlp_norm")
        q_norm, k_norm = values("q_norm"), values("k_norm")
        assert attention_norm is not None and mlp_norm is not None
        norms = HeadNorms(q_norm, k_norm, config.rms_eps) if q_norm is not None and k_norm is not None else None
        attention = Attention(
            ColumnLinear(linear("qkv"), values("qkv_bias")),
            RowLinear(linear("output"), values("output_bias"), tp),
            norms,
            self._heads,
            config.head_dim,
            layer - self.layers.start,
            config.windows[layer] if config.windows else None,
            self.device,
        )
        mlp = GatedMlp(
            ColumnLinear(linear("gate_up"), values("gate_up_bias")),
            RowLinear(linear("down"), values("down_bias"), tp),
            config.activation,
        )
        return Layer(attention_norm, attention, mlp_norm, mlp, config.rms_eps)

    def _matrix(self, name: str) -> LinearWeight:
        weight = self.weights[name]
        assert isinstance(weight, LinearWeight)
        return weight

    def _values(self, name: str) -> torch.Tensor | None:
        weight = self.weights.get(name)
        return None if weight is None else weight.tensor()
