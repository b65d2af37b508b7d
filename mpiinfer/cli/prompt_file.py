"""Reading prompts from a JSONL file: one object a line, with optional id and sampling fields.

A line is `{"prompt": text}`, `{"messages": [...]}` or `{"prompt_token_ids": [...]}`. Anything else is an error that
names file and line.
"""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mpiinfer.engine.prompts import Prompt
from mpiinfer.engine.request import SamplingParams
from mpiinfer.errors import RequestError

_SOURCES = ("prompt", "messages", "prompt_token_ids")


class PromptLine(NamedTuple):
    """One prompt of a file, its id (None: its index will do) and its own sampling."""

    id: str | None
    prompt: Prompt
    sampling: SamplingParams


def read_prompts(file: Path, defaults: SamplingParams) -> list[PromptLine]:
    """All prompts of `file`; fields that a line does not set are those of `defaults`. Blank lines are skipped.

    Raises RequestError naming file and line.
    """
    try:
        lines = file.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from None
    prompts = [_prompt(f"{file}:{number}", line, defaults) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise RequestError(f'{file}: holds no prompts: write one JSON object a line, such as {{"prompt": "Hello"}}')
    return prompts


def _prompt(where: str, line: bytes, defaults: SamplingParams) -> PromptLine:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{where}: not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError(f"{where}: nested too deep: write messages of plain text") from None
    if not isinstance(record, dict):
        raise RequestError(f"{where}: must be a JSON object, not {type(record).__name__}")
    given = [source for source in _SOURCES if source in record]
    if len(given) != 1:
        raise RequestError(f"{where}: needs exactly one of {', '.join(_SOURCES)}, has {', '.join(given) or 'none'}")
    prompt = record.pop(given[0])
    name = record.pop("id", None)
    if name is not None and (not isinstance(name, str | int) or isinstance(name, bool)):
        raise RequestError(f"{where}: id must be a string or an integer, not {type(name).__name__}")
    _check_type(where, given[0], prompt)
    return PromptLine(None if name is None else str(name), prompt, _sampling(where, record, defaults))


def _check_type(where: str, source: str, prompt: Any) -> None:
    wanted: dict[str, Any] = {"prompt": str, "messages": list[dict[str, Any]], "prompt_token_ids": list[int]}
    try:
        msgspec.convert(prompt, wanted[source])
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {source}: {str(error).lower()}") from None
    if not prompt:
        raise RequestError(f"{where}: {source} is empty: give at least one token")


def _sampling(where: str, fields: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    if unknown := fields.keys() - set(SamplingParams.__struct_fields__):
        known = ", ".join(("id", *SamplingParams.__struct_fields__))
        raise RequestError(f"{where}: unknown field {min(unknown)!r}: beside the prompt there may be {known}")
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    try:
        return msgspec.convert({**msgspec.structs.asdict(defaults), **fields}, SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {str(error).lower()}") from None
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None
