"""200 mixed requests over thread domains; real worlds run the other layouts (tests/mpi/world/test_mixed_mpi.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiinfer import Engine, Layout
from mpiinfer.comm.domain import Domain
from mpiinfer.comm.local import run_local
from mpiinfer.engine.request import Output
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

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(pipeline=2, slots=5),
    Layout(pipeline=3),
    Layout(replicas=3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("mixed") / "llama", "llama", seed=8, **SHAPE)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_request_gets_its_own_tokens(folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests(seed=LAYOUTS.index(layout))

    def work(world: Domain) -> list[Output]:
        with Engine.open(str(folder), layout=tiny_cache(layout), comm=world) as engine:
            return answer_mixed(engine, requests)

    with small_steps(monkeypatch) as schedulers:
        outputs = run_local(layout.num_ranks, work)[0]
    check_mixed(folder, requests, outputs)
    check_counts(counts_of(schedulers))
