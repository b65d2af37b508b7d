"""Text to token ids and back: `Tokenizer`, its streams and `StopStrings`, all that the engine sees of text.

Promises the ids of transformers for a Hugging Face folder and of llama.cpp for a GGUF file, BOS at most once, and
streams whose pieces join to exactly what `decode` gives. Refuses to know models, requests and files' formats: two
builders (`text.folder`, `text.gguf`) turn files into `TokenizerParts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpiinfer.errors import RequestError
from mpiinfer.text.chat_template import ChatTemplate
from mpiinfer.text.detokenize import Detokenizer, Stream
from mpiinfer.text.folder import load_folder
from mpiinfer.text.gguf import build_tokenizer
from mpiinfer.text.parts import TokenizerParts


class Tokenizer:
    """One model's tokenizer. It does not change after it is made, so threads may share it."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._detokenizer = Detokenizer(parts.backend, parts.clean_up)
        self._template: ChatTemplate | None = None
        prefix = parts.backend.encode("", add_special_tokens=True).ids + list(parts.prefix_ids)
        self._adds_bos = parts.bos_token_id is not None and prefix[:1] == [parts.bos_token_id]

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """From a Hugging Face folder. Raises ModelError when it holds no usable tokenizer.json."""
        return cls(load_folder(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: Path) -> Tokenizer:
        """From GGUF keys and their Python values; `path` is for errors. Raises ModelError for what is unsupported."""
        return cls(build_tokenizer(metadata, path))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows."""
        return self._parts.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._parts.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output, as far as the tokenizer's own files say."""
        return self._parts.eos_token_ids

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Special tokens in `text` are recognized. A BOS that `text` brings is not doubled."""
        parts = self._parts
        try:
            ids: list[int] = parts.backend.encode(text, add_special_tokens=add_special).ids
        except TypeError as error:
            raise RequestError(f"prompt: {_why_no_text(text)}") from error
        if add_special:
            ids = [*parts.prefix_ids, *ids, *parts.suffix_ids]
            if self._adds_bos and ids[1:2] == [parts.bos_token_id]:
                del ids[0]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens, and ids that have no token, give no text."""
        return self._detokenizer.decode(ids)

    def stream(self) -> Stream:
        """The text of one output while its tokens arrive; its pieces, joined, equal `decode`."""
        return self._detokenizer.stream()

    def apply_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next message. Raises RequestError for messages that the model cannot take."""
        parts = self._parts
        if parts.chat_template is None:
            fix = "send a prompt instead of messages, or add chat_template.jinja to a folder"
            raise RequestError(f"{parts.path}: the tokenizer has no chat template; {fix}")
        if self._template is None:
            self._template = ChatTemplate(parts.chat_template, parts.chat_template_source, parts.special_tokens)
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of `apply_chat`. The template brings BOS where the model wants it, so none is added."""
        return self.encode(self.apply_chat(messages), add_special=False)


def _why_no_text(text: object) -> str:
    if not isinstance(text, str):
        return f"must be a string, not {type(text).__name__}"
    half = next((index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    return f"character {half} is half of a surrogate pair; send valid Unicode"


class StopStrings:
    """Ends a text before the first stop string that becomes complete in it, however the text is cut into pieces.

    Where several become complete with the same character, the one that starts first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"stop: must be a list of strings that are not empty, not {stops!r:.80}")
        self._stops = tuple(stops)
        self._held = ""
        self._is_found = False

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that no stop string can begin in, and whether one was found; after that there is no more text."""
        if self._is_found:
            return "", True
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held, self._is_found = "", True
            return text[: min(found)[1]], True
        split = len(text) - self._num_undecided(text)
        self._held = text[split:]
        return text[:split], False

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
