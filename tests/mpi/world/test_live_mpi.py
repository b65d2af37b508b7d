"""Requests that come while the engine runs: it sleeps in between, wakes at once, and every replica takes its part."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpiinfer import Engine, Layout, SamplingParams
from mpiinfer.engine.inbox import LiveInbox
from mpiinfer.engine.request import Output
from mpiinfer.engine.runner import Runner
from tests.models import tiny_model

WORLD = MPI.COMM_WORLD
WINDOW_S = 0.5
NUM_WAKES = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tiny_model(tmp_path_factory.mktemp("live") / "llama", "llama", seed=8) if WORLD.rank == 0 else None
    ready = WORLD.Ibarrier()
    while not ready.Test():
        time.sleep(0.01)
    yield WORLD.bcast(made)


def hear(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When this rank hears of each plan that computes, from now on."""
    heard_s: list[float] = []
    real = Runner.accept

    def accept(runner: Runner, data: bytes) -> Any:
        plan = real(runner, data)
        if plan.num_tokens:
            heard_s.append(time.perf_counter())
        return plan

    monkeypatch.setattr(Runner, "accept", accept)
    return heard_s


class Load:
    """The smallest share of a core that this process took in any WINDOW_S, watched from a thread of its own."""

    def __init__(self) -> None:
        self.least = 1.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            start_s, busy_s = time.perf_counter(), time.process_time()
            if self._ended.wait(WINDOW_S):
                return
            share = (time.process_time() - busy_s) / (time.perf_counter() - start_s)
            self.least = min(self.least, share)


@pytest.mark.ranks(1, 2)  # as many as there are cores: with more, who wakes first is the system's choice
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_an_idle_engine_sleeps_and_wakes_at_once(folder: Path, axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard_s = hear(monkeypatch)
    submitted_s: list[float] = []
    answered = threading.Event()
    with Engine.open(str(folder), layout=Layout(**{axis: WORLD.size}), comm=WORLD) as engine:

        def client(inbox: LiveInbox) -> None:
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            for index in range(NUM_WAKES):
                answered.clear()
                time.sleep(0.1)
                request = engine.request(index, [5, 6], params)
                submitted_s.append(time.perf_counter())
                inbox.submit(request)
                assert answered.wait(30)
            time.sleep(4 * WINDOW_S)
            inbox.close()

        inbox = LiveInbox(lambda output: answered.set()) if engine.is_first else None
        if inbox is not None:
            threading.Thread(target=client, args=(inbox,)).start()
        with Load() as load:
            engine.run(inbox)
    shares, heard = WORLD.gather(load.least), WORLD.gather(heard_s)
    if shares is not None and heard is not None:
        last_s = [max(times) for times in zip(*heard, strict=True)]
        late_s = [heard_s - sent_s for heard_s, sent_s in zip(last_s, submitted_s, strict=True)]
        print(f"woke after {1e3 * statistics.median(late_s):.1f} ms; share of a core asleep {max(shares):.2%}")
        assert statistics.median(late_s) < 5e-3, late_s
        assert max(shares) < 0.02, shares


@pytest.mark.ranks(2, 4)
def test_replicas_pull_from_one_queue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is slower takes fewer requests, and all end together."""
    heads = WORLD.size // 2
    slow = WORLD.rank >= heads
    if slow:
        real = Runner.finish

        def finish(runner: Runner, plan: Any, hidden: Any, between: Any) -> bytes:
            time.sleep(0.02)
            return real(runner, plan, hidden, between)

        monkeypatch.setattr(Runner, "finish", finish)
    tokens = [0]
    real_accept = Runner.accept

    def accept(runner: Runner, data: bytes) -> Any:
        plan = real_accept(runner, data)
        tokens[0] += plan.num_tokens
        return plan

    monkeypatch.setattr(Runner, "accept", accept)
    prompts = [[7, number + 2] for number in range(40)]
    layout = Layout(replicas=2, tensor=heads, order="launcher")
    with Engine.open(str(folder), layout=layout, comm=WORLD) as engine:
        outputs: list[Output] = engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True), concurrency=4)
        ended_s = time.perf_counter()
    counts, ends = WORLD.gather(tokens[0]), WORLD.gather(ended_s)
    if counts is not None and ends is not None:
        assert [output.index for output in outputs] == list(range(40))
        assert sum(counts[::heads]) == 40 * (2 + 8 - 1)
        assert counts[-1] < counts[0] / 2
        assert max(ends) - min(ends) < 0.5
