"""Options that several verbs share, and what they mean: the layout of a command line, and the engine over it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from mpiinfer.cli.report import describe_layout, load_progress
from mpiinfer.comm.launch import World
from mpiinfer.engine.engine import Engine
from mpiinfer.errors import LayoutError, UsageError
from mpiinfer.files import shipped_dir
from mpiinfer.layout.spec import Layout, read_layout
from mpiinfer.observe.log import LOGGER

F = TypeVar("F", bound=Callable[..., Any])


model_option = click.option("--model", required=True, help="A card's name, a Hugging Face folder, or a .gguf file.")
weights_option = click.option(
    "--weights",
    default="exact",
    metavar="FORMAT",
    help="exact (fp32 on CPUs), fp32, bf16, fp16, int8, int4, native (as in the files) or auto (fastest within 1 %).",
)


def layout_options(function: F) -> F:
    """--layout FILE, or --tp, --pp and --dp."""
    options = (
        click.option("--layout", "layout_file", metavar="FILE", help="Layout file (TOML), or the name of one of ours."),
        click.option("--tp", type=click.IntRange(1), help="Tensor-parallel shards of each stage."),
        click.option("--pp", type=click.IntRange(1), help="Pipeline stages."),
        click.option("--dp", type=click.IntRange(1), help="Data-parallel replicas."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def chosen_layout(options: Mapping[str, Any]) -> Layout | None:
    """The layout that the options name, or None where they leave the choice to the planner.

    Raises UsageError for a file beside numbers, LayoutError for a bad file or name.
    """
    layout_file, tp, pp, dp = (options[name] for name in ("layout_file", "tp", "pp", "dp"))
    if layout_file is not None:
        if any(number is not None for number in (tp, pp, dp)):
            raise UsageError("--layout and --tp, --pp, --dp exclude each other: give the file or the numbers")
        return read_layout(_layout_path(layout_file))
    if tp is None and pp is None and dp is None:
        return None
    return Layout(tensor=tp or 1, pipeline=pp or 1, replicas=dp or 1)


def _layout_path(name: str) -> Path:
    path = Path(name)
    if path.exists() or path.name != name or path.suffix == ".toml":
        return path
    ours = {file.stem: file for file in sorted(shipped_dir("layouts").glob("*.toml"))}
    if name not in ours:
        raise LayoutError(
            f"--layout {name}: there is no such file, and no layout of ours has that name: {', '.join(ours)}"
        )
    return ours[name]


@contextlib.contextmanager
def opened_engine(world: World, options: Mapping[str, Any], layout: Layout | None) -> Iterator[Engine]:
    """The engine that --model and --weights name; says how loading goes, and which layout was taken. Collective."""
    model, weights = options["model"], options["weights"]
    with (
        load_progress(world.domain.is_first) as on_load,
        Engine.open(model, layout=layout, comm=world, weights=weights, on_load=on_load) as engine,
    ):
        LOGGER.info("%s", describe_layout(engine))
        yield engine
