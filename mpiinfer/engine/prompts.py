"""From what a caller gives (texts, token ids, chat messages) to checked requests."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from mpiinfer.engine.request import Output, Request, SamplingParams, check_prompt
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
    cache_tokens: int,
) -> tuple[list[Request], list[Output]]:
    """A request for each prompt. `ids` name them in the output, by default by their index.

    cache_tokens: of the whole cache. A prompt that the model cannot take becomes an output that says why, and the
    others are answered. Raises RequestError where that is so of all prompts, and where the arguments do not fit.
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
    requests, refused, errors = [], [], []
    for index, (prompt, params, name) in enumerate(zip(prompts, each, names, strict=True)):
        try:
            text, token_ids = _tokenise(index, prompt, tokenizer)
            check_prompt(index, token_ids, vocab_size=config.vocab_size, max_positions=config.max_positions)
            request = Request(index=index, id=name, prompt=text, prompt_token_ids=token_ids, sampling=params)
            request.check_fits(config.max_positions, cache_tokens)
            requests.append(request)
        except RequestError as error:
            errors.append(error)
            refused.append(_refused(index, name, prompt, error))
    if errors and not requests:
        raise errors[0]
    return requests, refused


def _refused(index: int, name: str, prompt: Prompt, error: RequestError) -> Output:
    return Output(
        id=name,
        index=index,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        text="",
        token_ids=[],
        finish_reason="error",
        error=str(error),
    )


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
