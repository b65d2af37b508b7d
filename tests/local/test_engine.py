"""The engine over thread domains: every family, in awkward shapes and in every layout of up to four ranks, gives the
tokens of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpiinfer.comm.domain import Domain
from mpiinfer.comm.local import run_local
from mpiinfer.engine.engine import Engine
from mpiinfer.engine.request import Output, SamplingParams
from mpiinfer.engine.runner import Runner
from mpiinfer.errors import EngineError, LayoutError, MpiinferError, RequestError
from mpiinfer.layout.spec import Layout
from tests.models import FAMILIES, Reference, reference, tiny_model

# Every (tensor, pipeline) of up to four ranks, and one uneven six.
SPLITS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2)]

# Every family with heads, vocabulary, MLP width and layers that hardly anything divides; half of them tied.
HEADS = [(5, 5), (9, 3), (14, 2), (15, 5)]
AWKWARD: dict[str, tuple[str, dict[str, Any]]] = {
    f"{family}-{heads}-{kv_heads}": (
        family,
        {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": 1003,
            "intermediate_size": 1111,
            "num_hidden_layers": 5,
            "tie_word_embeddings": (number + place) % 2 == 0,
        },
    )
    for number, family in enumerate(FAMILIES)
    for place, (heads, kv_heads) in enumerate(HEADS)
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 1111}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-wide-heads": ("llama", {"num_attention_heads": 4, "head_dim": 24, "hidden_size": 40}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "qwen2-some-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "vocab_size": 1003}),
}
SHAPES = {**AWKWARD, **SPECIAL}
# A short, a middling and a long prompt: the long one is longer than every window and is masked in parts.
PROMPTS = [[5], [7, 100, 3, 250, 9, 9, 31], [(13 * i + 5) % 290 for i in range(70)]]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Reference]]]:
    """Makes each model once, with transformers' answers to PROMPTS."""
    made: dict[str, tuple[Path, list[Reference]]] = {}

    def model(name: str) -> tuple[Path, list[Reference]]:
        if name not in made:
            family, shape = SHAPES[name]
            shape = {"num_hidden_layers": 4, **shape}
            folder = tiny_model(tmp_path_factory.mktemp(name) / name, family, seed=3, **shape)
            made[name] = folder, [reference(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
        return made[name]

    return model


def generate(
    folder: Path, layout: Layout, prompts: list[Any], sampling: SamplingParams | list[SamplingParams]
) -> list[Output]:
    """The outputs of an engine over thread domains, as its first rank sees them."""

    def work(world: Domain) -> list[Output]:
        with Engine.open(str(folder), layout=layout, comm=world) as engine:
            outputs = engine.generate(prompts, sampling)
            assert bool(outputs) == world.is_first
            return outputs

    return run_local(layout.num_ranks, work)[0]


def _greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0, **fields})


@pytest.mark.parametrize(("tensor", "pipeline"), SPLITS)
@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_those_of_transformers(models: Any, name: str, tensor: int, pipeline: int) -> None:
    folder, expected = models(name)
    heads = SHAPES[name][1].get("num_attention_heads", 4)
    assert tensor <= heads
    outputs = generate(folder, Layout(tensor=tensor, pipeline=pipeline), PROMPTS, _greedy())
    for output, wanted in zip(outputs, expected, strict=True):
        assert wanted.smallest_gap > 1e-3
        assert output.token_ids == wanted.token_ids
        assert output.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert len(output.logprobs) == len(output.token_ids) == NUM_TOKENS


@pytest.fixture(scope="module")
def llama(models: Any) -> Path:
    return models("llama-9-3")[0]


SAMPLED = [
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=12, top_k=20, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.5, seed=13, top_p=0.7, ignore_eos=True),
]


@pytest.mark.parametrize("split", SPLITS[1:])
def test_sampled_tokens_depend_on_the_seed_alone(llama: Path, split: tuple[int, int]) -> None:
    """Not on the layout, and not on the other prompts of the call."""
    alone = [generate(llama, Layout(), [prompt], s)[0] for prompt, s in zip(PROMPTS, SAMPLED, strict=True)]
    together = generate(llama, Layout(tensor=split[0], pipeline=split[1]), PROMPTS, SAMPLED)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert len({tuple(output.token_ids) for output in alone}) == len(alone)
    other = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=99, ignore_eos=True)
    assert generate(llama, Layout(), [PROMPTS[0]], other)[0].token_ids != alone[0].token_ids


@pytest.mark.parametrize(
    "layout",
    [
        Layout(replicas=2),
        Layout(replicas=3),
        Layout(tensor=2, replicas=2),
        Layout(pipeline=2, replicas=2),
        Layout(pipeline=2, slots=1),
        Layout(pipeline=2, slots=5),
        Layout(pipeline=3, stages=(1, 1, 3)),
        Layout(tensor=2, slots=3),
        Layout(tensor=2, pipeline=2, order="launcher"),
        Layout(memory="1MiB"),  # room for a few sequences at a time: the others wait
    ],
    ids=str,
)
def test_other_layouts_give_the_same(llama: Path, layout: Layout) -> None:
    prompts = [[*PROMPTS[i % 3][: 1 + i % 5], i] for i in range(17)]
    expected = [output.token_ids for output in generate(llama, Layout(), prompts, _greedy())]
    outputs = generate(llama, layout, prompts, _greedy())
    assert [output.index for output in outputs] == list(range(17))
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_logprobs_are_one_a_token(llama: Path, split: tuple[int, int]) -> None:
    sampling = [_greedy(logprobs=3), _greedy(logprobs=0), _greedy(logprobs=None)]
    outputs = generate(llama, Layout(tensor=split[0], pipeline=split[1]), PROMPTS, sampling)
    with_top, plain, without = outputs
    assert len(with_top.logprobs or []) == len(with_top.top_logprobs or []) == NUM_TOKENS
    for token, logprob, top in zip(
        with_top.token_ids, with_top.logprobs or [], with_top.top_logprobs or [], strict=True
    ):
        assert len(top) == 3
        assert top[0].token_id == token and top[0].logprob == pytest.approx(logprob, abs=1e-6)
        assert [entry.logprob for entry in top] == sorted((entry.logprob for entry in top), reverse=True)
    assert len(plain.logprobs or []) == NUM_TOKENS and plain.top_logprobs is None
    assert without.logprobs is None and without.top_logprobs is None


def test_prompts_longer_than_a_step_are_cut(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(llama, Layout(), PROMPTS, _greedy())
    monkeypatch.setattr("mpiinfer.engine.replica.MAX_STEP_TOKENS", 16)
    for layout in (Layout(), Layout(tensor=2, pipeline=2)):
        outputs = generate(llama, layout, PROMPTS, _greedy())
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_a_prompt_of_2700_tokens_in_parts(tmp_path: Path) -> None:
    """Longer than many steps' budget: the parts overlap in the stages and look back at blocks of earlier ones."""
    folder = tiny_model(tmp_path / "long", "llama", seed=3, max_position_embeddings=4096)
    prompt = [(17 * i * i + 3) % 290 for i in range(2700)]
    expected = reference(folder, prompt, 4)
    assert expected.smallest_gap > 1e-3
    for layout in (Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(tensor=2, pipeline=3)):
        output = generate(folder, layout, [prompt], _greedy(max_tokens=4))[0]
        assert output.token_ids == expected.token_ids
        assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_the_whole_context(models: Any) -> None:
    """A prompt as long as the context gets one token; one longer is refused on every rank before anything runs."""
    folder, _ = models("llama-5-5")
    prompt = [(7 * i + 3) % 290 for i in range(512)]
    for layout in (Layout(), Layout(tensor=2, pipeline=2)):
        outputs = generate(folder, layout, [prompt, prompt[:511]], _greedy())
        assert outputs[0].token_ids == reference(folder, prompt, 1).token_ids
        assert [len(output.token_ids) for output in outputs] == [1, 2]
        assert outputs[0].finish_reason == "length"
        with pytest.raises(RequestError, match="513 tokens, more than the model's context of 512"):
            generate(folder, layout, [[*prompt, 1]], _greedy())


def test_a_prompt_that_is_refused_costs_the_others_nothing(llama: Path) -> None:
    prompts = [PROMPTS[0], [300_000], PROMPTS[1], []]
    expected = generate(llama, Layout(), PROMPTS[:2], _greedy())
    for layout in (Layout(), Layout(tensor=2, pipeline=2), Layout(replicas=2)):
        first, refused, second, empty = generate(llama, layout, prompts, _greedy())
        assert [first.token_ids, second.token_ids] == [output.token_ids for output in expected]
        assert (refused.finish_reason, refused.index, refused.token_ids) == ("error", 1, [])
        assert "prompt 1: token id 300000 is not in the vocabulary" in (refused.error or "")
        assert "prompt 3: is empty" in (empty.error or "")
        assert first.error is None


def test_end_of_sequence_tokens_end_a_text(models: Any, tmp_path: Path) -> None:
    """`eos_token_id` may be a list, and generation_config.json may add to it."""
    folder, expected = models("llama-5-5")
    tokens = expected[1].token_ids
    first_at = {token: tokens.index(token) for token in tokens}
    late = max(first_at, key=lambda token: first_at[token])
    unused = next(token for token in range(1003) if token not in first_at)
    for name, value in (("config.json", [unused, late]), ("generation_config.json", late)):
        changed = copy_with(folder, tmp_path / name, name, {"eos_token_id": value})
        output = generate(changed, Layout(pipeline=2), [PROMPTS[1]], SamplingParams(max_tokens=NUM_TOKENS))[0]
        assert output.token_ids == tokens[: first_at[late] + 1]
        assert output.finish_reason == "stop"
        ignoring = generate(changed, Layout(), [PROMPTS[1]], _greedy())[0]
        assert ignoring.token_ids == tokens and ignoring.finish_reason == "length"


def copy_with(folder: Path, to: Path, name: str, fields: dict[str, Any]) -> Path:
    """A copy of a model's folder with some fields of one of its JSON files changed."""
    shutil.copytree(folder, to)
    file = to / name
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**values, **fields}))
    return to


def test_stop_strings_end_a_text_before_them(llama: Path) -> None:
    whole = generate(llama, Layout(), ["some words"], _greedy(max_tokens=40))[0]
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    assert len(stop) == 3
    for layout in (Layout(), Layout(pipeline=2)):
        output = generate(llama, layout, ["some words"], _greedy(max_tokens=40, stop=("never in it", stop)))[0]
        assert output.text == whole.text[: whole.text.index(stop)]
        assert output.finish_reason == "stop"
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]


def test_texts_token_ids_and_chats(llama: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    text, ids, answer = generate(llama, Layout(tensor=2), ["hello", PROMPTS[1], chat], _greedy())
    assert text.prompt == "hello" and len(text.prompt_token_ids) > 0
    assert ids.prompt is None and ids.prompt_token_ids == PROMPTS[1]
    assert answer.prompt == "<|bos|><user>hello\n<assistant>" and answer.prompt_token_ids[0] == 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt 0: is empty"),
        (["", []], "prompt 0: is empty"),
        ([[1003]], "prompt 0: token id 1003 is not in the vocabulary of 0 to 1002"),
        ([[-1]], "prompt 0: token id -1"),
        ([["a", 2]], "prompt 0: must be a text"),
        ([1.5], "prompt 0: must be a text"),
        ([[1.5]], "prompt 0: must be a text"),
        ([None], "prompt 0: must be a text"),
        (None, "prompt 0: must be a text"),
        ([[{"role": "user"}]], "prompt 0: "),
        ("just a string", "must be a list"),
    ],
)
def test_bad_prompts_are_refused_on_every_rank(llama: Path, prompts: Any, message: str) -> None:
    def work(world: Domain) -> str:
        with Engine.open(str(llama), layout=Layout(tensor=2), comm=world) as engine:
            with pytest.raises(RequestError) as caught:
                engine.generate(prompts)
            outputs = engine.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))
            assert [len(output.token_ids) for output in outputs] == ([3] if world.is_first else [])
            return str(caught.value)

    first, second = run_local(2, work)
    assert first == second and message in first and "\n" not in first


def test_layouts_that_do_not_fit_are_refused_on_every_rank(llama: Path) -> None:
    def work(world: Domain) -> list[str]:
        messages = []
        for layout in (Layout(tensor=3), Layout(tensor=10), Layout(pipeline=9)):
            with pytest.raises(LayoutError) as caught:
                Engine.open(str(llama), layout=layout, comm=world)
            messages.append(str(caught.value))
        return messages

    first, second = run_local(2, work)
    assert first == second
    assert "3 ranks, but the world has 2" in first[0]
    assert "more than the model's 9 query heads" in first[1]
    assert "more than the model's 5 layers" in first[2]


def test_ranks_that_disagree_on_the_layout_say_so(llama: Path) -> None:
    def work(world: Domain) -> str:
        layout = Layout(tensor=2) if world.is_first else Layout(pipeline=2)
        with pytest.raises(LayoutError) as caught:
            Engine.open(str(llama), layout=layout, comm=world)
        return str(caught.value)

    first, second = run_local(2, work)
    assert first == second and "rank 1 sees another layout than rank 0" in first


def test_without_a_layout_all_ranks_are_used(llama: Path) -> None:
    def work(world: Domain) -> tuple[int, list[list[int]]]:
        with Engine.open(str(llama), comm=world) as engine:
            return engine.layout.num_ranks, [o.token_ids for o in engine.generate(PROMPTS, _greedy())]

    (num_ranks, tokens), *_ = run_local(4, work)
    assert num_ranks == 4
    assert tokens == [output.token_ids for output in generate(llama, Layout(), PROMPTS, _greedy())]


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_half_precision_runs_in_every_split(llama: Path, weights: str) -> None:
    """Rounded sums may differ between layouts, so only the first token's probability is compared, and loosely."""

    def logprob(layout: Layout) -> float:
        def work(world: Domain) -> float:
            with Engine.open(str(llama), layout=layout, comm=world, weights=weights) as engine:
                outputs = engine.generate([PROMPTS[2]], _greedy(max_tokens=1))
                return outputs[0].logprobs[0] if outputs and outputs[0].logprobs else 0.0

        return run_local(layout.num_ranks, work)[0]

    exact = generate(llama, Layout(), [PROMPTS[2]], _greedy(max_tokens=1))[0].logprobs
    assert exact is not None
    for tensor, pipeline in SPLITS:
        assert logprob(Layout(tensor=tensor, pipeline=pipeline)) == pytest.approx(exact[0], abs=0.25)


def test_a_rank_that_fails_ends_the_others_with_its_cause(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Runner.finish

    def failing(self: Runner, plan: Any, hidden: Any, between: Any) -> bytes:
        if self.step == 4 and self._stage.vocabulary.start > 0:
            raise ValueError("the cosmic ray")
        return real(self, plan, hidden, between)

    monkeypatch.setattr(Runner, "finish", failing)
    seen: dict[int, str] = {}

    def work(world: Domain) -> None:
        engine = Engine.open(str(llama), layout=Layout(tensor=2, pipeline=2), comm=world)
        with pytest.raises(MpiinferError) as caught:
            engine.generate(PROMPTS, _greedy())
        seen[world.rank] = str(caught.value)

    run_local(4, work)
    assert set(seen) == {0, 1, 2, 3}
    assert all("[rank 3, model llama-9-3, stage 1, step 4] ValueError: the cosmic ray" in s for s in seen.values())


def test_calls_follow_each_other(llama: Path) -> None:
    def work(world: Domain) -> list[list[list[int]]]:
        with Engine.open(str(llama), layout=Layout(pipeline=2), comm=world) as engine:
            calls = [PROMPTS, [], PROMPTS[:1], PROMPTS]
            return [[output.token_ids for output in engine.generate(prompts, _greedy())] for prompts in calls]

    first, empty, single, again = run_local(2, work)[0]
    assert first == again and empty == [] and single == first[:1]


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2), Layout(replicas=2)], ids=str)
def test_a_run_says_what_it_cost(llama: Path, layout: Layout) -> None:
    def work(world: Domain) -> tuple[int, int, bool]:
        with Engine.open(str(llama), layout=layout, comm=world) as engine:
            engine.generate(PROMPTS, _greedy(), concurrency=2)
            if engine.stats is None:
                return 0, 0, True
            tokens = sum(request.num_tokens for request in engine.stats.requests)
            sane = all(rank.forward_s + rank.wait_s <= rank.wall_s + 1e-3 for rank in engine.stats.ranks)
            return len(engine.stats.ranks), tokens, sane

    assert run_local(2, work) == [(2, 3 * NUM_TOKENS, True), (0, 0, True)]


def test_prompts_come_in_many_forms(llama: Path) -> None:
    """Generators, tuples, and the integers of numpy and torch."""
    import numpy as np
    import torch

    ids = PROMPTS[1]
    forms = [ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]]

    def work(world: Domain) -> list[list[int]]:
        with Engine.open(str(llama), layout=Layout(tensor=2), comm=world) as engine:
            return [output.token_ids for output in engine.generate((form for form in forms), _greedy())]

    tokens = run_local(2, work)[0]
    assert len(tokens) == len(forms) and len(set(map(tuple, tokens))) == 1


def _fails_then_stays_failed(llama: Path, first: Any, cause: str) -> None:
    """`first(engine)` fails on one rank; from then on every rank refuses with the first cause."""

    def work(world: Domain) -> tuple[str, str]:
        engine = Engine.open(str(llama), layout=Layout(tensor=2), comm=world)
        with pytest.raises((MpiinferError, KeyboardInterrupt)) as caught:
            first(engine)
        with pytest.raises(EngineError) as again:
            engine.generate(PROMPTS, _greedy())
        return str(caught.value), str(again.value)

    for _, again in run_local(2, work):
        assert "cannot be used any more" in again and cause in again


def test_a_callback_that_fails_ends_the_engine(llama: Path) -> None:
    def on_finish(output: Output) -> None:
        raise ValueError("mine")

    _fails_then_stays_failed(
        llama, lambda engine: engine.generate(PROMPTS, _greedy(), on_finish=on_finish), "ValueError: mine"
    )


def test_an_interrupt_ends_the_engine_on_every_rank(llama: Path) -> None:
    def on_finish(output: Output) -> None:
        raise KeyboardInterrupt

    _fails_then_stays_failed(
        llama, lambda engine: engine.generate(PROMPTS, _greedy(), on_finish=on_finish), "KeyboardInterrupt"
    )


def test_logits_that_are_no_numbers_are_an_error(llama: Path, tmp_path: Path) -> None:
    import safetensors.torch
    import torch

    folder = tmp_path / "damaged"
    shutil.copytree(llama, folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for sampling in (_greedy(), SamplingParams(temperature=1.0, top_p=0.9)):
        with pytest.raises(EngineError, match="logits are not finite"):
            generate(folder, Layout(tensor=2), [PROMPTS[0]], sampling)


def test_ranks_with_other_weights_say_so(llama: Path, models: Any) -> None:
    """As happens when ranks stand in different folders: the same name, other files."""
    other = models("llama-15-5")[0]

    def work(world: Domain) -> str:
        with pytest.raises(LayoutError) as caught:
            Engine.open(str(llama if world.is_first else other), layout=Layout(tensor=2), comm=world)
        return str(caught.value)

    first, second = run_local(2, work)
    assert first == second and "rank 1 sees another config than rank 0" in first


def test_many_prompts_run_in_bounded_steps(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpiinfer.engine.replica.MAX_SLOT_SEQUENCES", 3)
    sizes: list[int] = []
    real = Runner.finish

    def counting(self: Runner, plan: Any, hidden: Any, between: Any) -> bytes:
        sizes.append(len(plan.chunks))
        return real(self, plan, hidden, between)

    monkeypatch.setattr(Runner, "finish", counting)
    outputs = generate(llama, Layout(), [[token] for token in range(2, 22)], _greedy(max_tokens=3))
    assert len(outputs) == 20 and max(sizes) == 3


def test_a_temperature_of_almost_nothing_is_greedy(llama: Path) -> None:
    greedy, cold = (
        generate(llama, Layout(), PROMPTS, SamplingParams(max_tokens=8, temperature=t, seed=1, ignore_eos=True))
        for t in (0.0, 1e-320)
    )
    assert [output.token_ids for output in cold] == [output.token_ids for output in greedy]
