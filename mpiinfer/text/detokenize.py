"""Token ids to text, at once or token by token, with the same result to the last character.

Promises that a stream's pieces, joined, equal `decode` of all its ids for any ids at all: half characters, bytes that
are not UTF-8, special tokens, ids without a token. A piece is final: it never holds a character that a later token
would change. A push costs the same however long the output is, because a stream holds the undecided bytes only.

The `tokenizers` library decodes in steps that are written into the tokenizer ("decoder"). Two chains of steps cover
generative models, and a stream runs either one left to right: GPT-2's bytes spelled as letters, and SentencePiece's
pieces with byte tokens. Under any other chain a stream gives its text when it finishes: late, but exact.
Refuses to know encoding, chat, and where the tokenizer came from.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _letters_of_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others take the code points from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters_of_bytes()

PieceOf = Callable[[int], str | None]


class Stream(Protocol):
    """One output being decoded. Pieces are final."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often empty."""

    def finish(self) -> str:
        """The rest. Push no more after it."""


@dataclass(frozen=True)
class _PieceSteps:
    """A SentencePiece-like decoder: what becomes of a piece, and of the text's first characters."""

    replacements: tuple[tuple[str, str], ...] = ()
    word_start: str = ""
    drops_first_word_start: bool = False
    byte_fallback: bool = False
    strip: str = " "
    strip_left: int = 0


class Detokenizer:
    """Decodes the ids of one backend; `stream` starts an independent output."""

    def __init__(self, backend: tokenizers.Tokenizer, clean_up: bool) -> None:
        self._backend = backend
        self._clean_up = clean_up
        self._special_ids = frozenset(i for i in backend.get_added_tokens_decoder() if self._is_skipped(i))
        state = None if clean_up or backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._is_byte_level = state is not None and state["type"] == "ByteLevel"
        self._steps = None if state is None or self._is_byte_level else _piece_steps(state)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        if self._clean_up:
            for spaced, tight in _CLEAN_UP:
                text = text.replace(spaced, tight)
        return text

    def stream(self) -> Stream:
        if self._is_byte_level:
            return _ByteLevelStream(self._piece)
        if self._steps is not None:
            return _PieceStream(self._piece, self._steps)
        return _WholeStream(self.decode)

    def _is_skipped(self, token_id: int) -> bool:
        # A token's `special` flag may be younger than the library's own list, which is what decoding goes by.
        # Three of a kind, because a decoder may strip the first.
        three = [token_id] * 3
        shown: str = self._backend.decode(three, skip_special_tokens=False)
        return shown != self._backend.decode(three, skip_special_tokens=True)

    def _piece(self, token_id: int) -> str | None:
        return None if token_id in self._special_ids else self._backend.id_to_token(token_id)


def _piece_steps(state: dict[str, Any]) -> _PieceSteps | None:
    """The steps of a decoder that works left to right; None for one that this module cannot stream."""
    chain: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    names = " ".join(step["type"] for step in chain)
    if not re.fullmatch(r"(Metaspace|Replace( Replace)*)?( ?ByteFallback)?( ?Fuse( Strip)?)?", names):
        return None
    by_name = {step["type"]: step for step in chain}
    replaced = [step for step in chain if step["type"] == "Replace"]
    strip = by_name.get("Strip", {"content": " ", "start": 0, "stop": 0})
    if strip["stop"] or any("String" not in step["pattern"] for step in replaced):
        return None
    metaspace = by_name.get("Metaspace", {"replacement": "", "prepend_scheme": "never"})
    return _PieceSteps(
        replacements=tuple((step["pattern"]["String"], step["content"]) for step in replaced),
        word_start=metaspace["replacement"],
        drops_first_word_start=metaspace["prepend_scheme"] != "never",
        byte_fallback="ByteFallback" in by_name,
        strip=strip["content"],
        strip_left=strip["start"],
    )


class _ByteLevelStream:
    """Tokens are bytes spelled as letters; the text is their UTF-8, with U+FFFD for what is none."""

    def __init__(self, piece: PieceOf) -> None:
        self._piece = piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if piece is None:
            return ""
        try:
            data = bytes([_BYTE_OF_LETTER[letter] for letter in piece])
        except KeyError:  # An added token that is not spelled in the alphabet stands for itself.
            data = piece.encode()
        return self._utf8.decode(data)

    def finish(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class _PieceStream:
    """Tokens are text, or `<0x..>` for a byte. A run of bytes is text only if the whole run is UTF-8, so it waits for
    its end; otherwise each byte is a U+FFFD."""

    def __init__(self, piece: PieceOf, steps: _PieceSteps) -> None:
        self._piece = piece
        self._steps = steps
        self._run = bytearray()
        self._is_first = True
        self._strip_left = steps.strip_left

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if piece is None:
            return ""
        piece = self._respell(piece)
        if self._steps.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            self._run.append(int(byte[1], 16))
            return ""
        return self._stripped(self._end_run() + piece)

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _respell(self, piece: str) -> str:
        steps = self._steps
        for old, new in steps.replacements:
            piece = piece.replace(old, new)
        if steps.word_start:
            drop = self._is_first and steps.drops_first_word_start
            piece = piece.replace(steps.word_start, "" if drop else " ")
        self._is_first = False
        return piece

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._steps.strip:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class _WholeStream:
    """For decoders that look at the whole text: nothing is final before the end."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return ""

    def finish(self) -> str:
        text = self._decode(self._ids)
        self._ids.clear()
        return text
