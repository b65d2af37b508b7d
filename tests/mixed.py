"""Many requests of all kinds at random times, some given up, over a cache that holds hardly any of them: written once,
run over thread domains and in real worlds.

Promises: what is checked does not depend on when things happen to run; the answers are held against transformers by
one forward over each whole sequence. Refuses to know over which domain the engine runs.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiinfer import Engine, Layout, SamplingParams
from mpiinfer.engine import replica
from mpiinfer.engine.inbox import LiveInbox
from mpiinfer.engine.request import Output
from mpiinfer.engine.scheduler import Counts, Scheduler
from mpiinfer.model.shard import HeadShard
from tests.models import load_reference, random_prompt

NUM_REQUESTS = 200
VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 300, 9, 3, 16, 4
SHAPE: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
}
# The longest request takes 120 tokens, eight blocks of 16; this many blocks hold one of them and a few short ones.
NUM_BLOCKS, BLOCK_TOKENS = 12, 16
# Below it a prompt is not cut: more than the tiny prompts here have.
STEP_TOKENS = 24


@dataclass(frozen=True)
class Mixed:
    """prompt, number of new tokens, seconds after the one before at which it comes, and after which it is given up."""

    prompt: list[int]
    num_new: int
    gap_s: float
    cancel_s: float | None


def mixed_requests(seed: int, count: int = NUM_REQUESTS) -> list[Mixed]:
    """Some come in a rush, some alone; half of them begin like others; a fifth is given up soon."""
    chance = random.Random(seed)
    beginnings = [random_prompt(length, vocab_size=VOCABULARY, seed=length) for length in (17, 33, 48)]

    def one(number: int) -> Mixed:
        own = random_prompt(chance.randint(1, 12), vocab_size=VOCABULARY, seed=seed * count + number)
        prompt = [*chance.choice(beginnings), *own] if chance.random() < 0.5 else own * chance.randint(1, 3)
        cancel_s = chance.uniform(0, 0.05) if chance.random() < 0.2 else None
        num_new = chance.randint(1, 12) if chance.random() < 0.7 else chance.randint(40, 60)
        return Mixed(prompt, num_new, chance.choice((0.0, 0.0, 0.0, 0.005)), cancel_s)

    return [one(number) for number in range(count)]


def tiny_cache(layout: Layout) -> Layout:
    """`layout` with NUM_BLOCKS blocks of cache on its fullest rank, and so on all."""
    stages = [LAYERS // layout.pipeline + (stage < LAYERS % layout.pipeline) for stage in range(layout.pipeline)]
    widths = [
        HeadShard.of(HEADS, KV_HEADS, shard, layout.tensor).cache_width(HEAD_DIM) for shard in range(layout.tensor)
    ]
    num_bytes = NUM_BLOCKS * BLOCK_TOKENS * max(stages) * max(widths) * 4
    return Layout(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        replicas=layout.replicas,
        slots=layout.slots,
        stages=tuple(stages),
        block_tokens=BLOCK_TOKENS,
        memory=f"{num_bytes}B",
    )


@contextmanager
def small_steps(monkeypatch: Any) -> Iterator[list[Scheduler]]:
    """Steps of STEP_TOKENS at most, so that prompts are cut; gives the schedulers that are made meanwhile."""
    made: list[Scheduler] = []

    class Recorded(Scheduler):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(replica, "MAX_STEP_TOKENS", STEP_TOKENS)
        patch.setattr(replica, "Scheduler", Recorded)
        yield made


def answer_mixed(engine: Engine, requests: Sequence[Mixed]) -> list[Output]:
    """Submit each request at its time from another thread; all outputs on the first rank. Collective."""
    if not engine.is_first:
        engine.run()
        return []
    outputs: list[Output] = []
    inbox = LiveInbox(outputs.append)

    def submit() -> None:
        try:
            start_s = time.perf_counter()
            cancels: list[tuple[float, int]] = []
            for index, mixed in enumerate(requests):
                time.sleep(mixed.gap_s)
                now_s = time.perf_counter() - start_s
                params = SamplingParams(max_tokens=mixed.num_new, ignore_eos=True)
                inbox.submit(engine.request(index, mixed.prompt, params))
                if mixed.cancel_s is not None:
                    cancels.append((now_s + mixed.cancel_s, index))
                for _, late in [due for due in cancels if due[0] <= now_s]:
                    inbox.cancel(late)
                cancels = [due for due in cancels if due[0] > now_s]
            for _, late in cancels:
                inbox.cancel(late)
        finally:
            inbox.close()

    thread = threading.Thread(target=submit)
    thread.start()
    engine.run(inbox)
    thread.join()
    return outputs


def check_mixed(folder: Path, requests: Sequence[Mixed], outputs: Sequence[Output]) -> None:
    """Each request was answered once; its tokens are those of transformers, as far as it got."""
    assert sorted(output.index for output in outputs) == list(range(len(requests)))
    wrong = [output.index for output in outputs if not _is_greedy(folder, output)]
    assert not wrong, f"other tokens than transformers' for requests {wrong}"
    for output in outputs:
        mixed = requests[output.index]
        assert output.prompt_token_ids == mixed.prompt
        if mixed.cancel_s is None:
            assert output.finish_reason == "length" and len(output.token_ids) == mixed.num_new
        else:
            assert output.finish_reason in ("length", "cancelled") and len(output.token_ids) <= mixed.num_new


def _is_greedy(folder: Path, output: Output) -> bool:
    """Whether each token is the likeliest after all before it."""
    import torch

    if not output.token_ids:
        return True
    with torch.inference_mode():
        ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
        logits = _model(folder)(input_ids=ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
    return bool(logits.argmax(-1).tolist() == output.token_ids)


_models: dict[Path, Any] = {}


def _model(folder: Path) -> Any:
    if folder not in _models:
        _models[folder] = load_reference(folder)
    return _models[folder]


def counts_of(schedulers: Sequence[Scheduler]) -> list[Counts]:
    """What a rank's schedulers have counted, after they were seen to have lost no block."""
    for scheduler in schedulers:
        scheduler.pool.check()
        assert scheduler.pool.num_used == 0
    return [scheduler.counts for scheduler in schedulers]


def check_counts(counts: Sequence[Counts]) -> None:
    """The trace was as hard as it is meant to be."""
    assert sum(each.preemptions for each in counts) > 0
    assert sum(each.shared_tokens for each in counts) > 0
