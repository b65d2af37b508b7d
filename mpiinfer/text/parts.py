"""`TokenizerParts`: what a tokenizer's files say, in one value that does not depend on which files they were.

Promises nothing but the meaning of its fields. Refuses to know Hugging Face folders, GGUF, templates' syntax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers


@dataclass(frozen=True)
class TokenizerParts:
    """Made by `folder.load_folder` or `gguf.build_tokenizer`, used up by `tokenizer.Tokenizer`."""

    path: Path
    """The folder or file that errors name."""
    backend: tokenizers.Tokenizer
    """Special tokens, pre-tokenizer, model, decoder and post-processor."""
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    prefix_ids: tuple[int, ...] = ()
    """Put before an encoded text, where the backend's post-processor does not do it."""
    suffix_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token` and its like, as chat templates read them."""
    chat_template: str | None = None
    chat_template_source: str = ""
    """File and key of the template."""
    clean_up: bool = False
    """Remove the spaces before punctuation that word-piece vocabularies leave in decoded text."""
