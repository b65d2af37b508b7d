"""`mpiinfer generate` as a user starts it: the real model in every layout, its output, and its exit status."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import PROJECT, WorldResult, run_mpiinfer, run_world

MODEL = "smollm2-135m-instruct"
# Made with transformers 5.24 in float32 from the same file, dequantised; greedy.
CASES: list[dict[str, Any]] = json.loads((PROJECT / "tests/fixtures/smollm2_greedy.json").read_text())
# Prefill of 2,705 tokens on two cores that up to six ranks share.
LIMIT_S = 240


def generate(num_ranks: int, *arguments: str, timeout_s: float = LIMIT_S, **options: Any) -> WorldResult:
    return run_mpiinfer(num_ranks, "generate", *arguments, timeout_s=timeout_s, **options)


def write_cases(file: Path) -> Path:
    """The cases as prompts: texts and messages, so that the tokenizer is a part of what is tested."""
    with file.open("w") as lines:
        for case in CASES:
            source = {"messages": case["messages"]} if "messages" in case else {"prompt": case["prompt"]}
            lines.write(json.dumps({**source, "max_tokens": len(case["token_ids"])}) + "\n")
    return file


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("flags", ["--tp 1", "--tp 2", "--tp 3", "--tp 4", "--pp 2", "--pp 3", "--pp 4"])
def test_reference_tokens(tmp_path: Path, flags: str) -> None:
    check_reference_tokens(tmp_path, int(flags[-1]), *flags.split())


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(("layout", "num_ranks"), [("tp2_pp2", 4), ("tp3_pp2", 6)])
def test_reference_tokens_by_layout_file(tmp_path: Path, layout: str, num_ranks: int) -> None:
    check_reference_tokens(tmp_path, num_ranks, "--layout", str(PROJECT / "layouts" / f"{layout}.toml"))


def check_reference_tokens(folder: Path, num_ranks: int, *layout: str) -> None:
    """Equal id by id, the prompt of 2,705 tokens included; one log probability a token, within 2e-3."""
    output = folder / "out.jsonl"
    result = generate(
        num_ranks,
        *("--model", MODEL, *layout, "--prompts", str(write_cases(folder / "in.jsonl"))),
        *("--output", str(output), "--format", "jsonl", "--logprobs", "0"),
    )
    assert result.returncode == 0, result.shown()
    assert result.stdout == "" and not result.leftovers, result.shown()
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(len(CASES)))
    for record, case in zip(records, CASES, strict=True):
        assert record["prompt_token_ids"] == case["prompt_token_ids"]
        assert record["prompt"] == case["prompt"]
        assert record["token_ids"] == case["token_ids"]
        assert record["text"] == case["text"]
        assert record["logprobs"] == pytest.approx(case["logprobs"], abs=2e-3)
    check_ranks_report(result.stderr, num_ranks)


def check_ranks_report(stderr: str, num_ranks: int) -> None:
    """Each rank read its own bytes only, and held little beside its weights (the bounds of the loader's contract)."""
    pattern = r"rank (\d+) on .*: read (\d+) MB of its (\d+) MB .* holds (\d+) MB, peak memory (\d+) MB"
    ranks = [tuple(map(int, match)) for match in re.findall(pattern, stderr)]
    assert [rank for rank, *_ in ranks] == list(range(num_ranks)), stderr
    for _, read, own, held, peak in ranks:
        assert read <= 1.02 * own + 1
        assert peak <= held + 400


def test_text_goes_to_standard_output_and_everything_else_to_standard_error() -> None:
    case = CASES[0]
    result = generate(2, "--model", MODEL, "--prompt", case["prompt"], "--max-tokens", "30")
    assert result.returncode == 0, result.shown()
    assert result.stdout == case["text"] + "\n"
    assert "tensor=2 pipeline=1 replicas=1 layers=30" in result.stderr


def test_several_prompts_stop_strings_and_replicas() -> None:
    prompts = [argument for case in CASES[:3] for argument in ("--prompt", case["prompt"])]
    result = generate(
        2, "--model", MODEL, "--dp", "2", *prompts, "--format", "jsonl", "--stop", "\n", "--stop", "tosyn"
    )
    assert result.returncode == 0, result.shown()
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["text"] for record in records] == [" Paris.", "", " pho"]
    assert [record["finish_reason"] for record in records] == ["stop"] * 3
    assert all("logprobs" not in record for record in records)


def test_sampling_is_the_same_in_every_layout() -> None:
    """A seed decides the tokens; a line of a file may set its own."""
    lines = [{"prompt": "Once upon a time", "id": "a"}, {"prompt": "Once upon a time", "seed": 8, "temperature": 1.5}]
    lines += [{"prompt_token_ids": [504, 3575], "max_tokens": 5, "top_k": 10, "id": 7}]
    text = "\n".join(map(json.dumps, lines))
    answers = []
    for num_ranks, layout in ((1, ("--tp", "1")), (3, ("--tp", "3")), (2, ("--pp", "2"))):
        result = generate(
            num_ranks,
            *("--model", MODEL, *layout, "--prompts", "/dev/stdin", "--format", "jsonl", "--max-tokens", "16"),
            *("--temperature", "0.9", "--top-p", "0.95", "--seed", "5"),
            input=text,
        )
        assert result.returncode == 0, result.shown()
        answers.append([json.loads(line) for line in result.stdout.splitlines()])
    assert [record["id"] for record in answers[0]] == ["a", "1", "7"]
    tokens = [[record["token_ids"] for record in answer] for answer in answers]
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[0][0] != tokens[0][1]


def test_the_example_runs() -> None:
    result = run_world(4, [sys.executable, str(PROJECT / "examples/half_of_a_world.py")], timeout_s=LIMIT_S)
    assert result.returncode == 0, result.shown()
    assert "ranks [0, 2] say:' Paris." in result.stdout and "pi = 3.141592654" in result.stdout


def test_help_needs_no_launcher() -> None:
    result = run_mpiinfer(0, "generate", "--help", timeout_s=60)
    assert result.returncode == 0 and "--max-tokens" in result.stdout


def test_help_is_said_once() -> None:
    result = run_mpiinfer(2, "generate", "--help", timeout_s=LIMIT_S)
    assert result.returncode == 0 and result.stdout.count("--max-tokens") == 1, result.shown()
