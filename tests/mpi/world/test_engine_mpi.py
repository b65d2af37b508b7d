"""The engine over real communicators: tiny models in awkward shapes give the tokens of transformers, on the world, on a
part of it, and over a torch group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpiinfer import Engine, Layout, SamplingParams
from mpiinfer.errors import LayoutError, RequestError
from tests.models import Reference, reference, tiny_model

WORLD = MPI.COMM_WORLD
PROMPTS = [[5], [7, 100, 3, 250, 9, 9, 31], [(13 * i + 5) % 290 for i in range(70)]]
NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 1111}),
    "qwen2": ("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 1003}),
    "qwen3": ("qwen3", {"num_attention_heads": 15, "num_key_value_heads": 5, "tie_word_embeddings": True}),
}
LAYOUTS = {
    1: [Layout()],
    2: [Layout(tensor=2), Layout(pipeline=2), Layout(replicas=2)],
    3: [Layout(tensor=3), Layout(pipeline=3), Layout(pipeline=3, slots=1)],
    4: [Layout(tensor=4), Layout(pipeline=4), Layout(tensor=2, pipeline=2), Layout(tensor=2, replicas=2)],
}

Models = dict[str, tuple[Path, list[Reference]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """One folder a family, made and answered by transformers on the first rank, which every rank then reads."""
    made: Models = {}
    if WORLD.rank == 0:
        base = tmp_path_factory.mktemp("models")
        for name, (family, shape) in SHAPES.items():
            folder = tiny_model(base / name, family, seed=5, num_hidden_layers=5, **shape)
            made[name] = folder, [reference(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
    # Asleep: ranks that spin in a blocking call take the cores from the one that works, for many times as long.
    ready = WORLD.Ibarrier()
    while not ready.Test():
        time.sleep(0.01)
    yield WORLD.bcast(made)
    WORLD.Barrier()


def check_tokens(engine: Engine, expected: list[Reference]) -> None:
    outputs = engine.generate(PROMPTS, GREEDY)
    assert len(outputs) == (len(PROMPTS) if engine.is_first else 0)
    for output, wanted in zip(outputs, expected, strict=False):
        assert output.token_ids == wanted.token_ids
        assert output.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS.get(WORLD.size, []), ids=str)
def test_tokens_are_those_of_transformers(models: Models, name: str, layout: Layout) -> None:
    folder, expected = models[name]
    with Engine.open(str(folder), layout=layout, comm=WORLD) as engine:
        assert engine.layout.num_ranks == WORLD.size
        check_tokens(engine, expected)


@pytest.mark.ranks(2, 4)
def test_over_a_torch_group(models: Models) -> None:
    """The code path of GPUs, with gloo in the place of NCCL."""
    folder, expected = models["llama"]
    layouts = {2: [Layout(tensor=2, device="gloo"), Layout(pipeline=2, device="gloo")]}
    for layout in layouts.get(WORLD.size, [Layout(tensor=2, pipeline=2, device="gloo")]):
        with Engine.open(str(folder), layout=layout, comm=WORLD) as engine:
            check_tokens(engine, expected)


@pytest.mark.ranks(3, 4)
def test_on_a_part_of_a_world_in_another_order(models: Models) -> None:
    """The communicator is the caller's: some ranks, reversed; the others do something else meanwhile."""
    folder, expected = models["qwen2"]
    part = WORLD.Split(color=int(WORLD.rank == 0), key=-WORLD.rank)
    if WORLD.rank == 0:
        assert sum(range(1000)) == 499500
    else:
        with Engine.open(str(folder), comm=part) as engine:
            assert engine.is_first == (WORLD.rank == WORLD.size - 1)
            check_tokens(engine, expected)
        part.Barrier()  # still ours
    part.Free()


@pytest.mark.ranks(at_least=2)
def test_two_engines_one_after_the_other_and_at_once(models: Models) -> None:
    first, second = models["llama"], models["qwen3"]
    with Engine.open(str(first[0]), comm=WORLD) as a, Engine.open(str(second[0]), comm=WORLD) as b:
        check_tokens(a, first[1])
        check_tokens(b, second[1])
        check_tokens(a, first[1])


@pytest.mark.ranks(2)
def test_a_bad_prompt_is_refused_on_every_rank_and_the_engine_lives(models: Models) -> None:
    folder, expected = models["llama"]
    with Engine.open(str(folder), comm=WORLD) as engine:
        with pytest.raises(RequestError, match="prompt 0: token id 300"):
            engine.generate([[300]])
        check_tokens(engine, expected)


def test_a_rank_reads_its_own_bytes_only(models: Models) -> None:
    """By the kernel's count of what this process asked for, the engine's own and its tokenizer's files aside."""
    folder, _ = models["mistral"]
    with Engine.open(str(folder), comm=WORLD) as engine:
        for report in engine.reports:
            assert report.bytes_read <= 1.02 * report.shard_bytes_in_file
        if engine.is_first:
            total = sum(report.shard_bytes_in_file for report in engine.reports)
            whole = (folder / "model.safetensors").stat().st_size
            assert len(engine.reports) == WORLD.size
            assert total < whole * (1 + 0.15 * WORLD.size)


@pytest.mark.ranks(2)
def test_opening_in_vain_frees_every_communicator(models: Models) -> None:
    """MPICH has 2,046 of them; an engine takes two for its world before it finds the layout wanting."""
    folder, expected = models["llama"]
    for _ in range(1100):
        with pytest.raises(LayoutError):
            Engine.open(str(folder), layout=Layout(tensor=3), comm=WORLD)
    with Engine.open(str(folder), comm=WORLD) as engine:
        check_tokens(engine, expected)
