"""Resolving a layout: `auto` and `balanced` to numbers for one model, and the best layout where none was given.

Returns new layouts; never changes one. Pure arithmetic over the manifest's costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec

from mpiinfer.errors import LayoutError
from mpiinfer.layout.spec import Layout
from mpiinfer.model.config import ModelConfig
from mpiinfer.model.manifest import check_shards
from mpiinfer.plan.cost import stage_works

# Typical costs on a CPU node, used only to rank layouts: weight elements read a second by a rank, and seconds of one
# all-reduce of a decode step within a node and of one activation sent.
ELEMENTS_PER_S = 3e9
REDUCE_S, SEND_S = 2e-5, 5e-5


def resolve(layout: Layout, config: ModelConfig) -> Layout:
    """The layout with layer counts and slots as numbers.

    Raises LayoutError for more stages than layers, more shards than heads, or counts that do not add up.
    """
    check_shards(config, layout.tensor)
    if layout.pipeline > config.num_layers:
        raise LayoutError(
            f"layout: [parallel] pipeline = {layout.pipeline} is more than the model's {config.num_layers} layers: "
            f"use {config.num_layers} or less"
        )
    stages = layout.stages
    if stages == "balanced":
        stages = balanced(*_works(config, layout.tensor), num_layers=config.num_layers, num_stages=layout.pipeline)
    if sum(stages) != config.num_layers:
        raise LayoutError(
            f"layout: [pipeline] stages = {list(stages)} adds up to {sum(stages)} layers, but the model has "
            f"{config.num_layers}"
        )
    return msgspec.structs.replace(layout, stages=stages, slots=layout.num_slots)


def balanced(layer_work: int, head_work: int, *, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layer counts that make the slowest stage as fast as can be; the head weighs on the last stage.

    The last stage takes fewer layers for the head's sake, never none; the others share the rest evenly, the earlier
    ones the larger counts.
    """
    if num_stages == 1:
        return (num_layers,)

    def slowest(last: int) -> tuple[int, int]:
        others = -(-(num_layers - last) // (num_stages - 1))
        return max(others * layer_work, last * layer_work + head_work), -last

    last = min(range(1, num_layers - num_stages + 2), key=slowest)
    each, larger = divmod(num_layers - last, num_stages - 1)
    return (*(each + (stage < larger) for stage in range(num_stages - 1)), last)


def best_layout(config: ModelConfig, nodes: Sequence[int]) -> Layout:
    """The layout of all ranks that answers a single stream soonest; rank r runs on node `nodes[r]`.

    Shards of a stage stay on one node, unless nothing else fits the ranks; replicas are used only where the model
    cannot use more shards and stages. Raises LayoutError where no layout of this many ranks exists.
    """
    num_ranks = len(nodes)
    layouts = [layout for layout in _layouts(num_ranks) if _is_possible(layout, config)]
    if not layouts:
        raise LayoutError(
            f"no layout of {num_ranks} ranks fits a model of {config.num_heads} query heads and {config.num_layers} "
            "layers: start another number of ranks"
        )
    ranks_per_node = min(nodes.count(node) for node in set(nodes))
    near = [layout for layout in layouts if layout.tensor <= ranks_per_node]
    return min(near or layouts, key=lambda layout: (step_time(layout, config), layout.replicas))


def step_time(layout: Layout, config: ModelConfig) -> float:
    """Estimated seconds of one token through all stages: a figure to compare layouts by, not a promise."""
    layer_work, head_work = _works(config, layout.tensor)
    compute_s = (layer_work * config.num_layers + head_work) / ELEMENTS_PER_S
    num_reduces = 2 * config.num_layers + 1 if layout.tensor > 1 else 0
    return compute_s + num_reduces * REDUCE_S + (layout.pipeline - 1) * SEND_S


@cache
def _works(config: ModelConfig, tensor: int) -> tuple[int, int]:
    return stage_works(config, tensor)


def _layouts(num_ranks: int) -> list[Layout]:
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    return [
        Layout(tensor=tensor, pipeline=pipeline, replicas=num_ranks // tensor // pipeline)
        for tensor in divisors
        for pipeline in divisors
        if num_ranks // tensor % pipeline == 0
    ]


def _is_possible(layout: Layout, config: ModelConfig) -> bool:
    try:
        resolve(layout, config)
    except LayoutError:
        return False
    return True
