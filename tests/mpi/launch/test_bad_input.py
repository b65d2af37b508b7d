"""A user's mistake: one line with the fix on rank 0, the right exit status, no traceback, all ranks gone in seconds."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import World, WorldResult, run_mpiinfer
from tests.models import tiny_model

MODEL = "smollm2-135m-instruct"
# From the line that says what is wrong until the last rank is gone. (Until that line every rank imports torch, which
# takes as long as the machine is busy.)
GONE_WITHIN_S = 10.0
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=2)


def refused(result: WorldResult, status: int, *words: str) -> None:
    """One line of error, said once, which holds `words`."""
    assert result.returncode == status, result.shown()
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1, result.shown()
    assert all(word in lines[0] for word in words), result.shown()
    assert "Traceback" not in result.stderr and result.stdout == "", result.shown()
    assert not result.leftovers, result.shown()


def generate(num_ranks: int, *arguments: str) -> WorldResult:
    """A run that ends with an error, and in time."""
    with World(num_ranks, [sys.executable, "-m", "mpiinfer", "generate", *arguments]) as world:
        world.await_output("error:", LIMIT_S)
        return world.wait(GONE_WITHIN_S)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, ["--model"]),
        (["--model", MODEL], 2, ["--prompt", "--prompts"]),
        (["--model", "no-such-card", "--prompt", "x"], 1, ["no-such-card", MODEL]),
        (["--model", "./nowhere.gguf", "--prompt", "x"], 1, ["nowhere.gguf"]),
        (["--model", MODEL, "--prompt", "x", "--tp", "3"], 2, ["= 3 ranks", "the world has 2"]),
        (["--model", MODEL, "--prompt", "x", "--tp", "0"], 2, ["--tp"]),
        (["--model", MODEL, "--prompt", "x", "--tp", "2", "--layout", "tp2"], 2, ["--layout and --tp"]),
        (["--model", MODEL, "--prompt", "x", "--layout", "no.toml"], 2, ["no.toml"]),
        (["--model", MODEL, "--prompt", "x", "--layout", "nosuch"], 2, ["nosuch", "solo, tp2, tp2_pp2"]),
        (["--model", MODEL, "--prompt", "x", "--temperature", "-1"], 2, ["temperature = -1"]),
        (["--model", MODEL, "--prompt", "x", "--temperature", "hot"], 2, ["--temperature", "hot"]),
        (["--model", MODEL, "--prompt", "x", "--top-p", "0"], 2, ["top_p = 0"]),
        (["--model", MODEL, "--prompt", "x", "--max-tokens", "0"], 2, ["max_tokens = 0"]),
        (["--model", MODEL, "--prompt", "x", "--weights", "fp17"], 2, ["fp17", "fp16"]),
        (["--model", MODEL, "--prompt", "x", "--logprobs", "2"], 2, ["--logprobs", "--format jsonl"]),
        (["--model", MODEL, "--prompt", ""], 2, ["prompt 0", "empty"]),
        (["--model", MODEL, "--prompt", "x", "--output", "/no/such/folder/out"], 2, ["--output /no/such/folder/out"]),
        (["--model", MODEL, "--prompt", "x", "--output", "/tmp"], 2, ["--output /tmp", "folder"]),
        (["--model", MODEL, "--prompt", "-h", "--top-k", "9" * 23], 2, ["top_k"]),
        (["--model", MODEL, "--prompt", "x", "--format", "xml"], 2, ["--format"]),
        (["--model", MODEL, "--promt", "x"], 2, ["--promt", "see mpiinfer generate --help"]),
    ],
)
def test_arguments(arguments: list[str], status: int, words: list[str]) -> None:
    refused(generate(2, *arguments), status, *words)


@pytest.mark.parametrize(
    ("layout", "num_ranks", "words"),
    [
        ("[parallel]\ntensr = 2", 2, ["layout.toml: [parallel] unknown key 'tensr'"]),
        ("[parallel]\ntensor = 'two'", 2, ["layout.toml: [parallel] tensor"]),
        ("[parallel]\npipeline = 3", 3, ["pipeline = 3 is more than the model's 2 layers"]),
        ("[parallel]\ntensor = 5", 5, ["tensor = 5 is more than the model's 4 query heads"]),
        ("[comm]\ndevice = 'nccl'", 1, ["nccl", "GPU"]),
    ],
)
def test_layouts(tmp_path: Path, model: Path, layout: str, num_ranks: int, words: list[str]) -> None:
    file = tmp_path / "layout.toml"
    file.write_text(layout)
    refused(generate(num_ranks, "--model", str(model), "--layout", str(file), "--prompt", "x"), 2, *words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["prompts.jsonl:2", "JSON"]),
        ("[1]", ["prompts.jsonl:2", "object"]),
        ("{}", ["prompts.jsonl:2", "exactly one of"]),
        ('{"prompt": "a", "messages": []}', ["prompts.jsonl:2", "exactly one of"]),
        ('{"prompt": 3}', ["prompts.jsonl:2", "prompt"]),
        ('{"prompt": "a", "temperature": -2}', ["prompts.jsonl:2", "temperature = -2"]),
        ('{"prompt": "a", "temprature": 1}', ["prompts.jsonl:2", "temprature", "max_tokens, temperature"]),
        ('{"prompt_token_ids": []}', ["prompts.jsonl:2", "empty"]),
        ("[" * 5000, ["prompts.jsonl:2", "nested too deep"]),
        ('{"id": true, "prompt": "a"}', ["prompts.jsonl:2", "id"]),
    ],
)
def test_prompt_files(tmp_path: Path, model: Path, line: str, words: list[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    refused(generate(2, "--model", str(model), "--prompts", str(file)), 2, *words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt_token_ids": [1, 300]}', ["prompt 1", "300", "0 to 299"]),
        (json.dumps({"prompt_token_ids": [1] * 513}), ["prompt 1", "513 tokens", "context of 512"]),
        ('{"messages": [{"content": "no role"}]}', ["prompt 1", "role"]),
    ],
)
def test_a_prompt_that_cannot_be_answered(tmp_path: Path, model: Path, line: str, words: list[str]) -> None:
    """It costs the others nothing: their answers are written, then one line says what was wrong with it."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    result = run_mpiinfer(
        2, "generate", "--model", str(model), "--prompts", str(file), "--format", "jsonl", timeout_s=LIMIT_S
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.shown()
    answered, refusal = map(json.loads, result.stdout.splitlines())
    assert answered["token_ids"] and not refusal["token_ids"], result.shown()
    said = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(said) == 1 and "1 prompt of 2 not answered" in said[0], result.shown()
    assert all(word in said[0] and word in refusal["error"] for word in words[1:]), result.shown()


def test_a_bad_run_leaves_an_older_output_alone(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    refused(generate(2, "--model", str(model), "--prompt", "", "--output", str(output)), 2, "empty")
    assert output.read_text() == "precious\n"


def test_results_that_cannot_be_written_are_one_line(model: Path) -> None:
    refused(generate(2, "--model", str(model), "--prompt", "x", "--output", "/dev/full"), 1, "/dev/full", "space")


def test_an_output_need_not_be_a_regular_file(model: Path) -> None:
    arguments = ("--model", str(model), "--prompt", "x", "--output", "/dev/null")
    result = run_mpiinfer(2, "generate", *arguments, timeout_s=LIMIT_S)
    assert result.returncode == 0 and not result.stdout, result.shown()


def test_prompts_are_not_overwritten(tmp_path: Path, model: Path) -> None:
    """A byte order mark is no part of the first prompt."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "fine"}\n')
    refused(generate(2, "--model", str(model), "--prompts", str(file), "--output", str(file)), 2, "file of --prompts")


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)


def _drop_key(key: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))

    return change


def _set_key(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, key: value}))

    return change


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_truncate, ["model.safetensors", "truncated"]),
        (_drop_key("hidden_size"), ["config.json", "'hidden_size'"]),
        (_set_key("architectures", ["MambaForCausalLM"]), ["config.json", "MambaForCausalLM", "LlamaForCausalLM"]),
        (_set_key("num_hidden_layers", 3), ["model.layers.2.", "missing"]),
        (_set_key("num_hidden_layers", 1), ["model.layers.1."]),
        (_set_key("vocab_size", 301), ["embed_tokens", "shape"]),
        (_remove("model.safetensors"), ["safetensors"]),
        (_remove("config.json"), ["config.json"]),
        (_remove("tokenizer.json"), ["tokenizer.json"]),
    ],
)
def test_model_folders(tmp_path: Path, change: Callable[[Path], None], words: list[str]) -> None:
    folder = tiny_model(tmp_path / "tiny", "llama", num_hidden_layers=2)
    change(folder)
    refused(generate(2, "--model", str(folder), "--prompt", "x"), 1, *words)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGML" + bytes(100))
    refused(generate(2, "--model", str(file), "--prompt", "x"), 1, "model.gguf", "GGUF")


def test_singletons_under_a_launcher_that_meant_more() -> None:
    """What `srun --mpi=none` makes of two tasks: two processes that MPI knows nothing of."""
    result = run_mpiinfer(
        0,
        *("generate", "--model", MODEL, "--prompt", "x"),
        timeout_s=LIMIT_S,
        env={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
    )
    refused(result, 1, "2", "--mpi=")


# A long answer of a tiny model, so that there is time to fail in the middle of it.
LONG = ("--prompt", "x", "--max-tokens", "500", "--ignore-eos")


def test_a_rank_that_raises_in_the_middle(tmp_path: Path, model: Path) -> None:
    """Its one line names rank, model, stage, step and cause; nobody waits for it."""
    script = tmp_path / "raising.py"
    script.write_text(
        "from mpiinfer.cli.main import main\n"
        "from mpiinfer.engine.runner import Runner\n"
        "real = Runner.finish\n"
        "def finish(self, plan, hidden, between):\n"
        "    if plan.number == 20 and self._stage.vocabulary.start:\n"
        "        raise OSError('the disk is on fire')\n"
        "    return real(self, plan, hidden, between)\n"
        "Runner.finish = finish\n"
        "main()\n"
    )
    with World(
        4, [sys.executable, str(script), "generate", "--model", str(model), "--tp", "2", "--pp", "2", *LONG]
    ) as w:
        result = w.wait(LIMIT_S)
        assert result.returncode == 1, result.shown()
        said = "[rank 3, model tiny, stage 1, step 20] OSError: the disk is on fire"
        assert sum(said in line for line in result.stderr.splitlines()) == 1, result.shown()
        assert "Traceback" not in result.stderr and not result.leftovers, result.shown()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_the_middle(model: Path, victim: int) -> None:
    arguments = ("generate", "--model", str(model), "--pp", "2", *LONG, *("--prompt", "y") * 200)
    with World(2, [sys.executable, "-m", "mpiinfer", *arguments]) as world:
        world.await_output("ranks:", LIMIT_S)
        os.kill(world.rank_pid(victim), signal.SIGKILL)
        result = world.wait(GONE_WITHIN_S)
        assert result.returncode != 0 and not result.leftovers, result.shown()
        assert "Traceback" not in result.stderr, result.shown()
