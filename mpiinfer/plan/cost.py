"""What a stage's shard costs: bytes of weights, bytes of cache a token, and work a token. Pure, from the manifest.

The manifest is also what the loader reads and the stage allocates, so these bytes are those bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiinfer.model.config import ModelConfig
from mpiinfer.model.manifest import stage_manifest
from mpiinfer.model.shard import HeadShard


@dataclass(frozen=True)
class ShardCost:
    """One rank's share. element_bytes is that of the dtype chosen for weights and activations.

    work: weight elements that one token multiplies (an embedding row is looked up, not multiplied).
    """

    layers: range
    shard: int
    weight_bytes: int
    cache_bytes_per_token: int
    work: int


def shard_cost(config: ModelConfig, layers: range, shard: int, num_shards: int, element_bytes: int) -> ShardCost:
    """The cost of shard `shard` of the stage that owns `layers`."""
    manifest = stage_manifest(config, layers, shard, num_shards)
    heads = HeadShard.of(config.num_heads, config.num_kv_heads, shard, num_shards)
    return ShardCost(
        layers=layers,
        shard=shard,
        weight_bytes=element_bytes * sum(parameter.num_elements for parameter in manifest),
        cache_bytes_per_token=element_bytes * heads.cache_width(config.head_dim) * len(layers),
        work=sum(parameter.num_elements for parameter in manifest if parameter.is_linear),
    )


def layer_ranges(stages: tuple[int, ...]) -> list[range]:
    """Layer counts of the stages as ranges of layers."""
    starts = [sum(stages[:index]) for index in range(len(stages))]
    return [range(start, start + count) for start, count in zip(starts, stages, strict=True)]


def stage_works(config: ModelConfig, num_shards: int) -> tuple[int, int]:
    """Work of one layer, and of the head, on the busiest shard (shard 0: larger parts go first)."""
    one = shard_cost(config, range(1), 0, num_shards, 1).work
    last = config.num_layers - 1
    with_head = shard_cost(config, range(last, last + 1), 0, num_shards, 1).work
    if config.num_layers == 1:  # the only layer's cost holds the head already
        without = config.vocab_size * config.hidden_size // num_shards
        return max(1, one - without), without
    return one, with_head - one
