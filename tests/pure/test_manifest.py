"""Any shape over any number of shards and stages: the manifests of all ranks cover each checkpoint tensor once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiinfer.errors import LayoutError
from mpiinfer.model.config import ModelConfig
from mpiinfer.model.families import EMBEDDING
from mpiinfer.model.manifest import Parameter, stage_manifest
from mpiinfer.model.shard import HeadShard
from tests.checkpoint_files import tensors_of, tiny_config

DIVIDED = ("_proj.weight", "_proj.bias", "embed_tokens.weight", "lm_head.weight")
WHOLE_BIASES = ("o_proj.bias", "down_proj.bias")


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    num_kv_heads = draw(st.integers(1, 6))
    flags = {
        flag: draw(st.booleans()) for flag in ("tied_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm")
    }
    return tiny_config(
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        head_dim=2 * draw(st.integers(1, 4)),
        hidden_size=draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 300)),
        vocab_size=draw(st.integers(1, 300)),
        num_layers=draw(st.integers(1, 7)),
        **flags,
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelConfig, int, list[range]]:
    """A config, a number of shards that it allows, and a cut of its layers into stages."""
    config = draw(configs())
    num_shards = draw(st.integers(1, min(config.num_heads, config.intermediate_size, config.vocab_size, 6)))
    cuts = sorted(draw(st.sets(st.integers(1, config.num_layers), max_size=3)) - {config.num_layers})
    stages = [range(*bounds) for bounds in zip([0, *cuts], [*cuts, config.num_layers], strict=True)]
    return config, num_shards, stages


Manifests = dict[tuple[int, int], tuple[Parameter, ...]]


def manifests_of(config: ModelConfig, num_shards: int, stages: list[range]) -> Manifests:
    """By (stage, shard)."""
    return {
        (stage, shard): stage_manifest(config, layers, shard, num_shards)
        for stage, layers in enumerate(stages)
        for shard in range(num_shards)
    }


def coverage(manifests: Manifests) -> dict[str, tuple[tuple[int, ...], Counter[int], int]]:
    """For each tensor its shape, how often each index of its divided dim is held, and which dim that is."""
    seen: dict[str, tuple[tuple[int, ...], Counter[int], int]] = {}
    for manifest in manifests.values():
        for piece in (piece for parameter in manifest for piece in parameter.pieces):
            dim = 1 if piece.tensor.endswith(("o_proj.weight", "down_proj.weight")) else 0
            whole = [len(r) == extent for r, extent in zip(piece.ranges, piece.shape, strict=True)]
            assert all(cut or at == dim for at, cut in enumerate(whole)), "only one dim is ever divided"
            shape, held, _ = seen.setdefault(piece.tensor, (piece.shape, Counter(), dim))
            assert shape == piece.shape and len(piece.ranges[dim]) > 0
            held.update(piece.ranges[dim])
    return seen


def copies(config: ModelConfig, name: str, index: int, num_shards: int, num_stages: int) -> int:
    """How many ranks should hold index `index` of the divided dim of a tensor."""
    if name == EMBEDDING and config.tied_embeddings:
        return min(num_stages, 2)
    if any(f".{part}_proj." in name for part in "kv"):
        heads = [HeadShard.of(config.num_heads, config.num_kv_heads, shard, num_shards) for shard in range(num_shards)]
        reads = [{query // config.group_size for query in shard.queries} for shard in heads]
        return sum(index // config.head_dim in kv for kv in reads)
    is_divided = name.endswith(DIVIDED) and not name.endswith(WHOLE_BIASES)
    return 1 if is_divided else num_shards


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_every_element_is_held_as_often_as_it_is_needed(layout: tuple[ModelConfig, int, list[range]]) -> None:
    config, num_shards, stages = layout
    seen = coverage(manifests_of(config, num_shards, stages))
    assert {name: shape for name, (shape, _, _) in seen.items()} == tensors_of(config)
    for name, (shape, held, dim) in seen.items():
        assert [held[i] for i in range(shape[dim])] == [
            copies(config, name, i, num_shards, len(stages)) for i in range(shape[dim])
        ], name


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_every_layer_is_on_exactly_one_stage(layout: tuple[ModelConfig, int, list[range]]) -> None:
    config, num_shards, stages = layout
    for shard in range(num_shards):
        owned: Counter[str] = Counter()
        for stage in range(len(stages)):
            manifest = manifests_of(config, num_shards, stages)[stage, shard]
            names = [parameter.name for parameter in manifest]
            assert len(names) == len(set(names))
            owned.update({name.split(".")[1] for name in names if name.startswith("layers.")})
        assert owned == {str(layer): 1 for layer in range(config.num_layers)}


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_shards_of_a_stage_differ_by_one_unit_only(layout: tuple[ModelConfig, int, list[range]]) -> None:
    config, num_shards, stages = layout
    manifests = manifests_of(config, num_shards, stages)
    rows = [{p.name: p.shape[0] for p in manifests[0, shard]} for shard in range(num_shards)]
    assert all(shard.keys() == rows[0].keys() for shard in rows)
    ups = [shard["layers.0.gate_up"] // 2 for shard in rows]
    assert max(ups) - min(ups) <= 32 and max(ups) <= 1.6 * min(ups) + 1
    queries = [
        len(HeadShard.of(config.num_heads, config.num_kv_heads, i, num_shards).queries) for i in range(num_shards)
    ]
    assert max(queries) - min(queries) <= 1


def test_tied_embedding_is_on_both_end_stages_and_nowhere_else() -> None:
    config = tiny_config(num_layers=3, tied_embeddings=True)
    stages = [range(1), range(1, 2), range(2, 3)]
    names = [[p.name for p in stage_manifest(config, layers, 0, 2)] for layers in stages]
    assert ["embedding" in stage for stage in names] == [True, False, True]
    assert ["norm" in stage for stage in names] == [False, False, True]
    linear = [{p.name: p.is_linear for p in stage_manifest(config, layers, 0, 2)} for layers in stages]
    assert not linear[0]["embedding"] and linear[2]["embedding"]
    untied = [[p.name for p in stage_manifest(tiny_config(num_layers=3), layers, 0, 2)] for layers in stages]
    assert "embedding" in untied[0] and "head" in untied[2] and "embedding" not in untied[2]


@pytest.mark.parametrize(
    ("num_shards", "changes", "what"),
    [
        (6, {}, "5 query heads"),
        (4, {"intermediate_size": 3}, "3 MLP columns"),
        (4, {"vocab_size": 3}, "3 vocabulary rows"),
    ],
)
def test_more_shards_than_there_is_to_share(num_shards: int, changes: dict[str, int], what: str) -> None:
    with pytest.raises(LayoutError) as error:
        stage_manifest(tiny_config(**changes), range(2), 0, num_shards)
    assert what in str(error.value) and f"tensor = {num_shards}" in str(error.value)
