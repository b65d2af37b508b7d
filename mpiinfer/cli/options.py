"""Options that several verbs share, and what they mean: the layout of a command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mpiinfer.errors import LayoutError, UsageError
from mpiinfer.layout.spec import Layout, read_layout

F = TypeVar("F", bound=Callable[..., Any])


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


def chosen_layout(layout_file: str | None, tp: int | None, pp: int | None, dp: int | None) -> Layout | None:
    """The layout that the options name, or None where they leave the choice to the planner.

    Raises UsageError for a file beside numbers, LayoutError for a bad file or name.
    """
    if layout_file is not None:
        if any(number is not None for number in (tp, pp, dp)):
            raise UsageError("--layout and --tp, --pp, --dp exclude each other: give the file or the numbers")
        return read_layout(_layout_path(layout_file))
    if tp is None and pp is None and dp is None:
        return None
    return Layout(tensor=tp or 1, pipeline=pp or 1, replicas=dp or 1)


def layouts_dir() -> Path:
    """The layouts of this installation: layouts/ of the repository, or their copy inside the wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "data" / "layouts"
    return inside if inside.is_dir() else package.parent / "layouts"


def _layout_path(name: str) -> Path:
    path = Path(name)
    if path.exists() or path.name != name or path.suffix == ".toml":
        return path
    ours = {file.stem: file for file in sorted(layouts_dir().glob("*.toml"))}
    if name not in ours:
        raise LayoutError(
            f"--layout {name}: there is no such file, and no layout of ours has that name: {', '.join(ours)}"
        )
    return ours[name]
