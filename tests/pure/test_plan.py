"""Resolving layouts: balanced stages are the best there are, and impossible layouts say which number is wrong."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiinfer.errors import LayoutError
from mpiinfer.layout.spec import Layout, read_layout
from mpiinfer.model.config import ModelConfig, Rope
from mpiinfer.plan.cost import layer_ranges, shard_cost
from mpiinfer.plan.fit import balanced, best_layout, resolve

LAYOUTS = sorted((Path(__file__).parents[2] / "layouts").glob("*.toml"))

SMOLLM2 = ModelConfig(
    family="llama",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_positions=8192,
    rms_eps=1e-5,
    rope=Rope(theta=1e5),
    tied_embeddings=True,
)


@pytest.mark.parametrize("file", LAYOUTS, ids=lambda file: file.stem)
def test_our_layouts_resolve(file: Path) -> None:
    layout = resolve(read_layout(file), SMOLLM2)
    assert layout.stages != "balanced"
    assert [layer for layers in layer_ranges(layout.stages) for layer in layers] == list(range(30))


def test_the_head_weighs() -> None:
    """SmolLM2's head is worth eight layers."""
    assert resolve(Layout(pipeline=2), SMOLLM2).stages == (19, 11)
    assert resolve(Layout(pipeline=1), SMOLLM2).stages == (30,)


@given(layers=st.integers(1, 12), stages=st.integers(1, 5), layer_work=st.integers(1, 9), head_work=st.integers(0, 40))
def test_balanced_is_the_best_of_all_cuts(layers: int, stages: int, layer_work: int, head_work: int) -> None:
    if stages > layers:
        return

    def slowest(counts: tuple[int, ...]) -> int:
        return max(*(count * layer_work for count in counts), counts[-1] * layer_work + head_work)

    all_cuts = [
        tuple(stop - start for start, stop in zip((0, *cuts), (*cuts, layers), strict=True))
        for cuts in combinations(range(1, layers), stages - 1)
    ]
    counts = balanced(layer_work, head_work, num_layers=layers, num_stages=stages)
    assert sum(counts) == layers and len(counts) == stages and min(counts) >= 1
    assert slowest(counts) == min(map(slowest, all_cuts))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pipeline=31), r"pipeline = 31 is more than the model's 30 layers"),
        (Layout(tensor=10), r"tensor = 10 is more than the model's 9 query heads"),
        (Layout(pipeline=2, stages=(20, 20)), r"stages = \[20, 20\] adds up to 40 layers, but the model has 30"),
    ],
)
def test_impossible_layouts(layout: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        resolve(layout, SMOLLM2)


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_the_best_layout_uses_all_ranks(num_ranks: int) -> None:
    layout = best_layout(SMOLLM2, [0] * num_ranks)
    assert layout.num_ranks == num_ranks


def test_the_best_layout_keeps_shards_on_a_node() -> None:
    assert best_layout(SMOLLM2, [0, 0, 1, 1]).tensor == 2
    assert best_layout(SMOLLM2, [0, 0, 0, 0]).tensor == 4


def test_no_layout_for_these_ranks() -> None:
    tiny = ModelConfig(**{**{f: getattr(SMOLLM2, f) for f in SMOLLM2.__dataclass_fields__}, "num_layers": 2})
    assert best_layout(tiny, [0] * 11).replicas == 11


def test_costs_add_up_to_the_model() -> None:
    """135 million parameters, whatever the cut; a tied embedding counts on both end stages."""
    whole = shard_cost(SMOLLM2, range(30), 0, 1, 1).weight_bytes
    assert whole == 134_515_008
    parts = [shard_cost(SMOLLM2, layers, 0, 1, 1).weight_bytes for layers in layer_ranges((19, 11))]
    assert sum(parts) == whole + SMOLLM2.vocab_size * SMOLLM2.hidden_size
