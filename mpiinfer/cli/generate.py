"""`mpiinfer generate`: prompts from the command line or a file, answers as text or JSONL on standard output."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from mpiinfer.cli.options import chosen_layout, layout_options, model_option, opened_engine, weights_option
from mpiinfer.cli.prompt_file import PromptLine, read_prompts
from mpiinfer.cli.report import describe_ranks, plural, prompt_progress
from mpiinfer.comm.agree import on_first
from mpiinfer.comm.launch import World
from mpiinfer.engine.request import Output, SamplingParams
from mpiinfer.errors import OutputError, RequestError, UsageError
from mpiinfer.observe.log import LOGGER


@click.command(context_settings={"show_default": True})
@model_option
@layout_options
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; may be given several times.")
@click.option("--prompts", "prompt_file", metavar="FILE", help="Prompts as JSONL, one object a line.")
@click.option("--output", metavar="FILE", help="Write the results here instead of standard output.")
@click.option(
    "--chat", is_flag=True, help="Put each text prompt into the model's chat template, as the user's message."
)
@click.option("--max-tokens", default=64, help="New tokens of each prompt at most; the context bounds them too.")
@click.option("--temperature", default=0.0, help="0 is greedy.")
@click.option("--top-p", default=1.0, help="Sample from the likeliest tokens that together have this probability.")
@click.option("--top-k", default=0, help="Sample from this many likeliest tokens; 0 is all.")
@click.option("--seed", type=int, default=None, help="Makes sampled tokens repeatable; in fp32 in any layout.")
@click.option(
    "--stop", "stops", multiple=True, metavar="TEXT", help="End a text before this; may be given several times."
)
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option(
    "--logprobs", type=int, default=None, metavar="K", help="In jsonl: log probabilities, and the K likeliest tokens."
)
@weights_option
@click.option("--format", "form", type=click.Choice(["text", "jsonl"]), default="text", help="Form of the results.")
@click.pass_obj
def generate(world: World, /, **options: Any) -> None:
    """Answer prompts: mpiexec -n 2 mpiinfer generate --model smollm2-135m-instruct --prompt "Hello"."""
    domain = world.domain
    layout = on_first(domain, lambda: chosen_layout(options))
    lines: list[PromptLine] = []  # on the first rank only

    def read() -> int:
        lines.extend(_prompts(options))
        _check_output(options)
        return len(lines)

    num_prompts = on_first(domain, read)
    with opened_engine(world, options, layout) as engine:
        LOGGER.info("%s", describe_ranks(engine.reports))
        started = time.perf_counter()
        with prompt_progress(engine.is_first, num_prompts) as on_finish:
            outputs = engine.generate(
                [line.prompt for line in lines],
                [line.sampling for line in lines],
                ids=[str(index) if line.id is None else line.id for index, line in enumerate(lines)],
                on_finish=on_finish,
            )
        wall_s = time.perf_counter() - started
        on_first(domain, lambda: _write(options["output"], _formatted(outputs, options["form"])))
        if engine.is_first:
            LOGGER.info("%s", _summary(outputs, wall_s))
        on_first(domain, lambda: _check_all_answered(outputs))


def _prompts(options: dict[str, Any]) -> list[PromptLine]:
    """The prompts of the command line or of the file, in order."""
    if bool(options["prompts"]) == bool(options["prompt_file"]):
        raise UsageError("give either --prompt TEXT (once or more) or --prompts FILE.jsonl")
    if options["logprobs"] is not None and options["form"] != "jsonl":
        raise UsageError("--logprobs K is reported in the jsonl form only: add --format jsonl")
    sampling = SamplingParams(
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        top_p=options["top_p"],
        top_k=options["top_k"],
        seed=options["seed"],
        stop=tuple(options["stops"]),
        ignore_eos=options["ignore_eos"],
        logprobs=options["logprobs"],
    )
    if options["prompt_file"]:
        lines = read_prompts(Path(options["prompt_file"]), sampling)
    else:
        lines = [PromptLine(None, text, sampling) for text in options["prompts"]]
    return [_as_chat(line) for line in lines] if options["chat"] else lines


def _as_chat(line: PromptLine) -> PromptLine:
    if not isinstance(line.prompt, str):
        return line
    return line._replace(prompt=[{"role": "user", "content": line.prompt}])


def _check_output(options: dict[str, Any]) -> None:
    """Find a bad path before any work, and touch nothing there: what stands in it is replaced by results only."""
    if options["output"] is None:
        return
    path = Path(options["output"])
    source = options["prompt_file"]
    if path.is_dir():
        raise UsageError(f"--output {path}: is a folder: name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "no permission to write" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"--output {path}: cannot be written: {reason}")
    if source is not None and path.exists() and Path(source).exists() and path.samefile(source):
        raise UsageError(f"--output {path}: is the file of --prompts: name another")


def _formatted(outputs: Sequence[Output], form: str) -> Iterator[bytes]:
    for output in outputs:
        if form == "jsonl":
            yield msgspec.json.encode(output) + b"\n"
        else:
            heading = f"--- {output.id}\n" if len(outputs) > 1 else ""
            yield f"{heading}{output.text}\n".encode()


def _write(output: str | None, results: Iterator[bytes]) -> None:
    """To the file, or to standard output."""
    try:
        with contextlib.nullcontext(sys.stdout.buffer) if output is None else Path(output).open("wb") as file:
            file.writelines(results)
            file.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 (else the interpreter complains once more at its end)
        raise OutputError("standard output was closed before all results were written") from None
    except OSError as error:
        where = "standard output" if output is None else f"--output {output}"
        raise OutputError(f"{where}: cannot be written: {error.strerror}") from None


def _check_all_answered(outputs: Sequence[Output]) -> None:
    """Raise RequestError where a prompt was refused: the others' results are written by now."""
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise RequestError(f"{plural(len(errors), 'prompt')} of {len(outputs)} not answered: {errors[0]}")


def _summary(outputs: Sequence[Output], wall_s: float) -> str:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(output.token_ids) for output in outputs)
    return (
        f"{plural(len(outputs), 'prompt')} of {plural(num_prompt, 'token')}, {plural(num_new, 'new token')} "
        f"in {wall_s:.2f} s: "
        f"{num_new / wall_s:.1f} tokens/s"
    )
