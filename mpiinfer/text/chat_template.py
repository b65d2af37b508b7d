"""`ChatTemplate`: a model's Jinja template, compiled in a sandbox and rendered over messages.

Promises the string that transformers' `apply_chat_template(..., add_generation_prompt=True)` makes of the same template
and messages. Templates come with the model and are not trusted: they run in Jinja's immutable sandbox.
Refuses to know tokens, files and tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mpiinfer.errors import ModelError, RequestError

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered and nothing else."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """`source` is the template, `where` names its file and key in errors, `special_tokens` are its variables."""

    def __init__(self, source: str, where: str, special_tokens: Mapping[str, str]) -> None:
        self._where = where
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {_one_line(error)}"
            raise ModelError(f"{where}: chat template has a syntax error, {reason}; correct the template") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks for the assistant's next message. Raises RequestError when the template refuses."""
        variables = {
            **self._special_tokens,
            "messages": [_as_templates_expect(message) for message in _checked(messages)],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # A template may fail in any way that an expression can.
            reason = _one_line(error)
            raise RequestError(f"{self._where}: chat template refuses the messages: {reason}; change them") from error


def _checked(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """`messages` as they are. Raises RequestError for what is no conversation, naming the message and its key."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError('messages: must be a list of at least one {"role": ..., "content": ...}')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f'messages[{index}]: must be {{"role": ..., "content": ...}}, not {message!r:.80}')
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}].role: must be a string such as 'system', 'user' or 'assistant'")
        content = message.get("content")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"messages[{index}].content: must be a string or a list of content parts")
    return messages


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that hold None, and with reasoning under the two names that templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in _REASONING_KEYS if key in present), None)
    if reasoning is None:
        return present
    renamed = {"thinking": reasoning}
    renamed.update(present)
    renamed["reasoning_content"] = reasoning
    return renamed


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
