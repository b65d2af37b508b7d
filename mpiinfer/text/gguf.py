"""Builds `TokenizerParts` from the metadata of a GGUF file.

Promises llama.cpp's ids for the same file, with special tokens recognized in the text. A byte-level vocabulary
("gpt2") is split by the rule that `tokenizer.ggml.pre` names and merged by the file's merges; a SentencePiece-like one
("llama") is merged by its scores and falls back to byte tokens. A rule that is not in the table is an error: a wrong
split gives wrong ids without a sign of it.
Refuses to know the file's layout (the caller reads it) and Hugging Face folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from mpiinfer.errors import ModelError
from mpiinfer.text.parts import TokenizerParts

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Token types, as GGUF numbers them."""
_WORD_START = "▁"
_ASCII_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_LLAMA3 = _ASCII_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _SYMBOLS
_QWEN2 = _ASCII_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _SYMBOLS
_QWEN35 = _ASCII_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
# Case counts for ASCII only, as in llama.cpp: any other letter is upper case and lower case at once.
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_CAPITALIZED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_CAPITALIZED}|{_CAPITALS}|\p{{N}}|" + _SYMBOLS_SLASH
_GPT4O = rf"{_CAPITALIZED}{_ASCII_CONTRACTIONS}?|{_CAPITALS}{_ASCII_CONTRACTIONS}?|\p{{N}}{{1,3}}|" + _SYMBOLS_SLASH
_CJK_NO_SPACE = r"[\u0800-\u9fa5\uac00-\ud7ff&&[^\s]]+"


@dataclass(frozen=True)
class _Split:
    """One pre-tokenizer: regular expressions, each applied to what the ones before it left apart."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    """A word that is a token is that token, whatever the merges would make of it."""
    adds_bos: bool = False
    """Where the file does not say."""


_SPLITS: dict[str, _Split] = {
    "default": _Split((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": _Split((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_NO_SPACE, r"\p{N}")),
    "tekken": _Split((_TEKKEN,), whole_words_first=True, adds_bos=True),
    "qwen35": _Split((_QWEN35,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum"), _Split((_GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _Split((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _Split((_LLAMA3,), whole_words_first=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"), _Split((_QWEN2,))
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _Split((_GPT4O,))),
}


@dataclass(frozen=True)
class _Vocabulary:
    """The arrays of one file, checked."""

    path: Path
    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    ids: dict[str, int]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        value = self.get(key, default)
        if value is not None and type(value) is not int:
            raise self.error(key, f"{value!r:.80} is no token id; convert the file again")
        return value if value is not None and 0 <= value < len(self.tokens) else None

    def error(self, key: str, reason: str) -> ModelError:
        return ModelError(f"{self.path}: tokenizer.ggml.{key}: {reason}")


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> TokenizerParts:
    """`metadata` maps GGUF keys to Python values. Raises ModelError naming `path` and the key that does not serve."""
    vocabulary = _vocabulary(metadata, path)
    model = vocabulary.get("model")
    if model == "gpt2":
        split = _split_of(vocabulary)
        backend = _byte_level(vocabulary, split)
        return _parts(vocabulary, backend, split.adds_bos, {})
    if model == "llama":
        defaults = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
        return _parts(vocabulary, _sentence_piece(vocabulary), True, defaults)
    raise vocabulary.error("model", f"{model!r} is not supported, only 'gpt2' and 'llama' are; use another file")


def _vocabulary(metadata: Mapping[str, Any], path: Path) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{path}: tokenizer.ggml.tokens: missing, so the file has no tokenizer; convert it again")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    ids = {token: index for index, token in enumerate(tokens)}
    vocabulary = _Vocabulary(path, metadata, tokens, ids)
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise vocabulary.error("tokens", f"{twice!r} stands there twice; convert the file again")
    for key in ("token_type", "scores"):
        if len(vocabulary.get(key, tokens)) != len(tokens):
            reason = f"{len(vocabulary.get(key))} entries for {len(tokens)} tokens; convert the file again"
            raise vocabulary.error(key, reason)
    return vocabulary


def _parts(
    vocabulary: _Vocabulary, backend: tokenizers.Tokenizer, adds_bos: bool, default_ids: Mapping[str, int]
) -> TokenizerParts:
    backend.add_tokens(_added_tokens(vocabulary))
    bos = vocabulary.token_id("bos_token_id", default_ids.get("bos_token_id"))
    eos = vocabulary.token_id("eos_token_id", default_ids.get("eos_token_id"))
    ends = {eos, vocabulary.token_id("eot_token_id"), vocabulary.token_id("eom_token_id")} - {None}
    adds_bos = bool(vocabulary.get("add_bos_token", adds_bos))
    adds_eos = bool(vocabulary.get("add_eos_token", False))
    for key, is_added, token_id in (("bos_token_id", adds_bos, bos), ("eos_token_id", adds_eos, eos)):
        if is_added and token_id is None:
            raise vocabulary.error(key, "missing, but the file wants it added to each text; convert the file again")
    template = vocabulary.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        reason = f"tokenizer.chat_template = {template!r:.80} must be a string; convert the file again"
        raise ModelError(f"{vocabulary.path}: {reason}")
    return TokenizerParts(
        path=vocabulary.path,
        backend=backend,
        bos_token_id=bos,
        eos_token_ids=frozenset(end for end in ends if end is not None),
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        suffix_ids=(eos,) if adds_eos and eos is not None else (),
        special_tokens=_special_tokens(vocabulary, default_ids),
        chat_template=template,
        chat_template_source=f"{vocabulary.path}: tokenizer.chat_template",
    )


def _special_tokens(vocabulary: _Vocabulary, default_ids: Mapping[str, int]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {
        name: vocabulary.token_id(f"{key}_token_id", default_ids.get(f"{key}_token_id")) for name, key in keys.items()
    }
    return {name: vocabulary.tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _added_tokens(vocabulary: _Vocabulary) -> list[AddedToken]:
    """The tokens that are found in a text before it is split."""
    types = vocabulary.get("token_type", ())
    # llama.cpp takes the blanks after Phi-3's special tokens for part of them; it goes by the model's name.
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    keeps_blanks = {"<unk>", "<s>", "<|endoftext|>"} if "phi-3" in name or "phi3" in name else vocabulary.ids.keys()
    return [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED, rstrip=token not in keeps_blanks)
        for token, kind in zip(vocabulary.tokens, types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _split_of(vocabulary: _Vocabulary) -> _Split:
    name = vocabulary.get("pre")
    if name not in _SPLITS:
        known = ", ".join(sorted(_SPLITS))
        what = "missing" if name is None else f"{name!r} is unknown"
        raise vocabulary.error("pre", f"{what}; convert the file again with one of: {known}")
    return _SPLITS[name]


def _byte_level(vocabulary: _Vocabulary, split: _Split) -> tokenizers.Tokenizer:
    merges = vocabulary.get("merges")
    if merges is None:
        raise vocabulary.error("merges", "missing; convert the file again")
    pairs = []
    for merge in merges:
        blank = merge.find(" ", 1)
        pairs.append((merge[:blank], merge[blank + 1 :]))
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=split.whole_words_first)
    except Exception as error:  # The library raises plain Exception for a merge whose tokens it does not find.
        raise vocabulary.error("merges", f"{error}; convert the file again") from error
    backend = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_as_letters])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    scores = vocabulary.get("scores")
    if scores is None:
        raise vocabulary.error("scores", "missing; convert the file again")
    unknown = vocabulary.token_id("unknown_token_id", 0)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=list(_merges_of_scores(vocabulary, scores)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(vocabulary.get("add_space_prefix", True))
    prefix = [normalizers.Prepend(_WORD_START)] if has_prefix else []
    strip = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _WORD_START)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_of_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Every way to join two tokens into a third, the third with the highest score first."""
    ids, tokens = vocabulary.ids, vocabulary.tokens
    for index in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        token = tokens[index]
        for cut in range(1, len(token)):
            if token[:cut] in ids and token[cut:] in ids:
                yield token[:cut], token[cut:]
