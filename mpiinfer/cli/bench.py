"""`mpiinfer bench`: tokens a second, and how long a request waits, on prompts made of random tokens.

Every request has the same number of tokens in and out, and a new one starts when another ends, so that `concurrency`
of them run at any time. The figures are of one run after a warm-up.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import click
import msgspec

from mpiinfer.cli.options import chosen_layout, layout_options, model_option, opened_engine, weights_option
from mpiinfer.comm.agree import on_first
from mpiinfer.comm.launch import World
from mpiinfer.engine.engine import Engine
from mpiinfer.engine.request import SamplingParams
from mpiinfer.engine.stats import RunStats, percentile
from mpiinfer.observe.log import LOGGER

WARM_UP_TOKENS = 4
COUNT = click.IntRange(1)


class Spread(msgspec.Struct, frozen=True):
    """Seconds that half of the requests, and 99 of 100, do not exceed."""

    p50: float
    p99: float


class BenchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON line. ttft_s: from a request's admission to its first token; tpot_s: from one token to the next."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Spread
    tpot_s: Spread
    wall_s: float
    step_overhead_fraction: float
    bubble_fraction: float
    comm_fraction: float
    weights: str
    layout: str
    peak_rss_bytes: list[int]


@click.command(context_settings={"show_default": True})
@model_option
@layout_options
@click.option("--requests", "num_requests", type=COUNT, default=64, help="Number of prompts.")
@click.option("--input-tokens", type=COUNT, default=32, help="Tokens of each prompt.")
@click.option("--output-tokens", type=COUNT, default=64, help="New tokens of each prompt.")
@click.option("--concurrency", type=COUNT, default=32, help="Prompts that run at once.")
@weights_option
@click.option("--seed", type=int, default=0, help="Of the random prompts.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON on standard output.")
@click.pass_obj
def bench(world: World, /, **options: Any) -> None:
    """Measure a layout: mpiexec -n 2 mpiinfer bench --model smollm2-135m-instruct --tp 2."""
    layout = on_first(world.domain, lambda: chosen_layout(options))
    with opened_engine(world, options, layout) as engine:
        chance = random.Random(options["seed"])
        prompts = [
            [chance.randrange(engine.config.vocab_size) for _ in range(options["input_tokens"])]
            for _ in range(options["num_requests"])
        ]
        run = SamplingParams(max_tokens=options["output_tokens"], ignore_eos=True)
        warm_up = SamplingParams(max_tokens=min(WARM_UP_TOKENS, options["output_tokens"]), ignore_eos=True)
        engine.generate(prompts[: options["concurrency"]], warm_up)
        engine.generate(prompts, run, concurrency=options["concurrency"])
        if engine.stats is not None:
            record = _record(engine, engine.stats, options["input_tokens"])
            LOGGER.info("%s", _sentence(record))
            if options["as_json"]:
                sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
                sys.stdout.buffer.flush()


def _record(engine: Engine, stats: RunStats, num_input: int) -> BenchRecord:
    num_output = sum(request.num_tokens for request in stats.requests)
    first = [request.first_token_s for request in stats.requests]
    each = [request.per_token_s for request in stats.requests if request.per_token_s is not None]
    return BenchRecord(
        output_tokens_per_s=num_output / stats.wall_s,
        total_tokens_per_s=(num_output + num_input * len(stats.requests)) / stats.wall_s,
        ttft_s=Spread(percentile(first, 0.5), percentile(first, 0.99)),
        tpot_s=Spread(percentile(each, 0.5), percentile(each, 0.99)),
        wall_s=stats.wall_s,
        step_overhead_fraction=stats.step_overhead_fraction,
        bubble_fraction=stats.bubble_fraction,
        comm_fraction=stats.comm_fraction,
        weights=engine.weights,
        layout=str(engine.layout),
        peak_rss_bytes=[report.peak_rss_bytes for report in engine.reports],
    )


def _sentence(record: BenchRecord) -> str:
    return (
        f"{record.output_tokens_per_s:.1f} new tokens/s ({record.total_tokens_per_s:.1f} with the prompts'); medians: "
        f"first token after {record.ttft_s.p50 * 1e3:.0f} ms, then one each {record.tpot_s.p50 * 1e3:.1f} ms; of the "
        f"ranks' time {record.bubble_fraction:.0%} waiting, {record.comm_fraction:.0%} in collectives; head's overhead "
        f"{record.step_overhead_fraction:.1%}"
    )
