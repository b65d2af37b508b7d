"""From what a caller gives (texts, token ids, chat messages) to checked requests."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from mpiinfer.engine.request import Request, SamplingParams, check_prompt
from mpiinfer.errors import RequestError
from mpiinfer.model.config import ModelConfig
from mpiinfer.text.tokenizer import Tokenizer

# A text, its token ids, or a chat: a list of messages, each with role and content.
Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


def make_requests(
    prompts: Iterable[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams],
    ids: Sequence[str] | None,
    tokenizer: Tokenizer,
    config: ModelConfig,
) -> list[Request]:
    """A request for each prompt. `ids` name them in the output, by default by their index.

    Raises RequestError naming the prompt that the model cannot take.
    """
    if isinstance(prompts, str):
        raise RequestError("prompts must be a list: give [prompt] for a single one")
    prompts = list(prompts) if isinstance(prompts, Iterable) else [prompts]
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if not all(isinstance(params, SamplingParams) for params in each):
        raise RequestError("sampling must be SamplingParams, or a list of them, one for each prompt")
    names = [str(index) for index in range(len(prompts))] if ids is None else list(ids)
    if len(each) != len(prompts) or len(names) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts, {len(each)} sampling parameters, {len(names)} ids: must be equal")
    requests = []
    for index, (prompt, params, name) in enumerate(zip(prompts, each, names, strict=True)):
        text, token_ids = _tokenise(index, prompt, tokenizer)
        check_prompt(index, token_ids, vocab_size=config.vocab_size, max_positions=config.max_positions)
        requests.append(Request(index=index, id=name, prompt=text, prompt_token_ids=token_ids, sampling=params))
    return requests


def _tokenise(index: int, prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """The prompt's text (a chat's as its template renders it, None for token ids) and its token ids."""
    try:
        if isinstance(prompt, str):
            return prompt, tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(message, dict) for message in prompt):
            text = tokenizer.apply_chat(prompt)  # type: ignore[arg-type]
            return text, tokenizer.encode(text, add_special=False)
    except RequestError as error:
        raise RequestError(f"prompt {index}: {str(error).removeprefix('prompt: ')}") from None
    try:
        return None, [operator.index(token) for token in prompt]  # type: ignore[arg-type]  # numpy's and torch's ints too
    except TypeError:
        raise RequestError(f"prompt {index}: must be a text, a list of token ids, or a list of messages") from None
