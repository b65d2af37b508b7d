"""What the program says of itself on standard error while it starts: the layout, the ranks, how loading goes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mpiinfer.engine.engine import Engine, OnLoad, RankReport
from mpiinfer.engine.inbox import OnFinish
from mpiinfer.engine.request import Output
from mpiinfer.observe.log import LOGGER

LINE_EVERY_S = 3.0


def describe_layout(engine: Engine) -> str:
    """One line: the model and the layout that runs it."""
    return (
        f"{engine.model}: {engine.layout} ({engine.layout.digest()}), {engine.weights} on {engine.device}, "
        f"cache for {engine.cache_tokens} tokens"
    )


def describe_ranks(reports: Sequence[RankReport]) -> str:
    """A line for each rank: its place, its layers, and the bytes it has read and holds."""
    lines = [
        f"rank {report.rank} on {report.host}: replica {report.replica}, stage {report.stage}, shard {report.shard}, "
        f"layers {report.layers[0]} to {report.layers[1] - 1}: read {size(report.bytes_read)} of its "
        f"{size(report.shard_bytes_in_file)} in {report.load_s:.1f} s, holds {size(report.weight_bytes)}, "
        f"peak memory {size(report.peak_rss_bytes)}"
        for report in reports
    ]
    return "\n  ".join(["ranks:", *lines])


def plural(count: int, what: str) -> str:
    """1 prompt, 2 prompts."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def size(num_bytes: int) -> str:
    """Bytes for people: 1.5 GB, 270 MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


@contextlib.contextmanager
def load_progress(speaks: bool) -> Iterator[OnLoad | None]:
    """A bar on a terminal; under a launcher that pipes standard error, a line now and then. First rank only."""
    if not speaks:
        yield None
    elif sys.stderr.isatty():
        with _bar("loading", DownloadColumn(), TransferSpeedColumn()) as (progress, task):
            yield lambda done, total: progress.update(task, completed=done, total=total)
    else:
        say = _now_and_then()
        yield lambda done, total: say(lambda: f"loading: {100 * done // max(total, 1)} % of {size(total)}")


@contextlib.contextmanager
def prompt_progress(speaks: bool, num_prompts: int) -> Iterator[OnFinish | None]:
    """The same for the prompts that this rank's replica finishes, of `num_prompts`."""
    if not speaks or num_prompts < 2:
        yield None
        return
    if sys.stderr.isatty():
        with _bar("prompts", MofNCompleteColumn(), total=num_prompts) as (progress, task):
            yield lambda output: progress.advance(task)
        return
    say = _now_and_then()
    started = time.perf_counter()
    num_done = num_tokens = 0

    def on_finish(output: Output) -> None:
        nonlocal num_done, num_tokens
        num_done += 1
        num_tokens += len(output.token_ids)
        rate = num_tokens / (time.perf_counter() - started)
        say(lambda: f"{num_done} of {num_prompts} prompts done, {rate:.1f} tokens/s")

    yield on_finish


@contextlib.contextmanager
def _bar(what: str, *columns: ProgressColumn, total: float | None = None) -> Iterator[tuple[Progress, TaskID]]:
    every = (TextColumn(what), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*every, console=Console(stderr=True), transient=True) as progress:
        yield progress, progress.add_task(what, total=total)


def _now_and_then() -> Callable[[Callable[[], str]], None]:
    """Says what it is given, but only every few seconds; the words are made only when they are said."""
    last = time.perf_counter()

    def say(words: Callable[[], str]) -> None:
        nonlocal last
        if time.perf_counter() - last >= LINE_EVERY_S:
            last = time.perf_counter()
            LOGGER.info("%s", words())

    return say
