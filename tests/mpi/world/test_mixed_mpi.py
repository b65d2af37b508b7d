"""200 mixed requests in real worlds, in every layout of each size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

from mpiinfer import Engine, Layout
from tests.mixed import (
    SHAPE,
    answer_mixed,
    check_counts,
    check_mixed,
    counts_of,
    mixed_requests,
    small_steps,
    tiny_cache,
)
from tests.models import tiny_model

WORLD = MPI.COMM_WORLD
LAYOUTS = {
    1: [Layout()],
    2: [Layout(tensor=2), Layout(pipeline=2), Layout(replicas=2)],
    3: [Layout(tensor=3), Layout(pipeline=3)],
    4: [Layout(tensor=4), Layout(pipeline=4), Layout(tensor=2, pipeline=2), Layout(tensor=2, replicas=2)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = None
    if WORLD.rank == 0:
        made = tiny_model(tmp_path_factory.mktemp("mixed") / "llama", "llama", seed=8, **SHAPE)
    wait_asleep()
    yield WORLD.bcast(made)


def wait_asleep() -> None:
    """A barrier that leaves the cores to the rank that is late: it is the one that computes."""
    ready = WORLD.Ibarrier()
    while not ready.Test():
        time.sleep(0.01)


@pytest.mark.parametrize("layout", LAYOUTS.get(WORLD.size, []), ids=str)
def test_every_request_gets_its_own_tokens(folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests(seed=WORLD.size)
    with (
        small_steps(monkeypatch) as schedulers,
        Engine.open(str(folder), layout=tiny_cache(layout), comm=WORLD) as engine,
    ):
        outputs = answer_mixed(engine, requests)
    everyone = WORLD.gather(counts_of(schedulers))
    if everyone is not None:
        check_mixed(folder, requests, outputs)
        check_counts([counts for of_rank in everyone for counts in of_rank])
    wait_asleep()
