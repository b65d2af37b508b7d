"""The manifest: the list of parameters that one shard of one stage owns.

One list, four readers: the stage allocates it, weights/ reads its bytes, plan/ prices it, tests compare it. A
parameter may be assembled from several tensors of the checkpoint (query, key and value in one matrix), stacked along
dim 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from mpiinfer.errors import LayoutError
from mpiinfer.model.config import ModelConfig
from mpiinfer.model.families import EMBEDDING, FINAL_NORM, HEAD, layer_name
from mpiinfer.model.shard import Cut, ShardSpec


@dataclass(frozen=True)
class Piece:
    """A part of one checkpoint tensor. `tensor`: canonical name. `shape`: full shape. `ranges`: what is taken."""

    tensor: str
    shape: tuple[int, ...]
    ranges: tuple[range, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.ranges)

    @property
    def num_elements(self) -> int:
        return prod(self.local_shape)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a stage. `name` is local to the stage; `is_linear` ones may be held in a linear format."""

    name: str
    pieces: tuple[Piece, ...]
    is_linear: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape: the pieces stacked along dim 0."""
        shapes = [piece.local_shape for piece in self.pieces]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def check_shards(config: ModelConfig, num_shards: int) -> None:
    """Raise LayoutError where a shard would hold nothing."""
    limits = {"query heads": config.num_heads, "MLP columns": config.intermediate_size}
    limits["vocabulary rows"] = config.vocab_size
    for what, limit in limits.items():
        if num_shards > limit:
            raise LayoutError(
                f"layout: [parallel] tensor = {num_shards} is more than the model's {limit} {what}: use {limit} or less"
            )


def stage_manifest(config: ModelConfig, layers: range, shard: int, num_shards: int) -> tuple[Parameter, ...]:
    """The parameters of shard `shard` of the stage that owns `layers`, in a fixed order.

    The first stage has the embedding, the last the final norm and the head; a tied embedding is on both. Raises
    LayoutError where there are more shards than heads, columns or vocabulary rows.
    """
    check_shards(config, num_shards)
    return tuple(_Builder(config, shard, num_shards).stage(layers))


class _Builder:
    def __init__(self, config: ModelConfig, shard: int, num_shards: int) -> None:
        self.config = config
        self.shard = shard
        self.num_shards = num_shards

    def stage(self, layers: range) -> Iterator[Parameter]:
        config = self.config
        is_first, is_last = layers.start == 0, layers.stop == config.num_layers
        vocabulary = (config.vocab_size, config.hidden_size)
        columns = ShardSpec("columns")
        tied_here = config.tied_embeddings and is_last
        if is_first or tied_here:
            yield self._parameter("embedding", self._piece(EMBEDDING, vocabulary, columns), is_linear=tied_here)
        for layer in layers:
            yield from self._layer(layer)
        if is_last:
            yield self._parameter("norm", self._piece(FINAL_NORM, (config.hidden_size,)))
        if is_last and not config.tied_embeddings:
            yield self._parameter("head", self._piece(HEAD, vocabulary, columns), is_linear=True)

    def _layer(self, layer: int) -> Iterator[Parameter]:
        config, hidden = self.config, self.config.hidden_size
        queries, kv = self._heads("queries"), self._heads("kv")
        num_rows = {"q": config.num_heads * config.head_dim, "k": config.num_kv_heads * config.head_dim}
        num_rows["v"] = num_rows["k"]
        specs = {"q": queries, "k": kv, "v": kv}
        columns = ShardSpec("columns")
        mlp = (config.intermediate_size, hidden)

        def piece(part: str, shape: tuple[int, ...], spec: ShardSpec | None = None) -> Piece:
            return self._piece(layer_name(layer, part), shape, spec)

        def name(part: str) -> str:
            return f"layers.{layer}.{part}"

        yield self._parameter(name("attention_norm"), piece("input_layernorm.weight", (hidden,)))
        qkv = [piece(f"self_attn.{x}_proj.weight", (num_rows[x], hidden), specs[x]) for x in "qkv"]
        yield self._parameter(name("qkv"), *qkv, is_linear=True)
        if config.qkv_bias:
            yield self._parameter(
                name("qkv_bias"), *[piece(f"self_attn.{x}_proj.bias", (num_rows[x],), specs[x]) for x in "qkv"]
            )
        if config.qk_norm:
            yield self._parameter(name("q_norm"), piece("self_attn.q_norm.weight", (config.head_dim,)))
            yield self._parameter(name("k_norm"), piece("self_attn.k_norm.weight", (config.head_dim,)))
        output = piece("self_attn.o_proj.weight", (hidden, num_rows["q"]), self._heads("queries", dim=1))
        yield self._parameter(name("output"), output, is_linear=True)
        if config.output_bias:
            yield self._parameter(name("output_bias"), piece("self_attn.o_proj.bias", (hidden,)))
        yield self._parameter(name("mlp_norm"), piece("post_attention_layernorm.weight", (hidden,)))
        gate_up = [piece(f"mlp.{x}_proj.weight", mlp, columns) for x in ("gate", "up")]
        yield self._parameter(name("gate_up"), *gate_up, is_linear=True)
        if config.mlp_bias:
            biases = [piece(f"mlp.{x}_proj.bias", (config.intermediate_size,), columns) for x in ("gate", "up")]
            yield self._parameter(name("gate_up_bias"), *biases)
        down = piece("mlp.down_proj.weight", (hidden, config.intermediate_size), ShardSpec("columns", dim=1))
        yield self._parameter(name("down"), down, is_linear=True)
        if config.mlp_bias:
            yield self._parameter(name("down_bias"), piece("mlp.down_proj.bias", (hidden,)))

    def _heads(self, cut: Cut, dim: int = 0) -> ShardSpec:
        config = self.config
        return ShardSpec(cut, dim, config.num_heads, config.num_kv_heads, config.head_dim)

    def _piece(self, tensor: str, shape: tuple[int, ...], spec: ShardSpec | None = None) -> Piece:
        return Piece(tensor, shape, (spec or ShardSpec()).ranges(shape, self.shard, self.num_shards))

    def _parameter(self, name: str, *pieces: Piece, is_linear: bool = False) -> Parameter:
        return Parameter(name, pieces, is_linear)
