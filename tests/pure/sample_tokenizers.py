"""Tokenizers for tests: the real SmolLM2 out of its GGUF file, and small ones trained on the spot.

Promises real shapes (byte-level with special tokens, SentencePiece-like with byte tokens) in milliseconds.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mpiinfer.weights.source import resolve_model

CORPUS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "I'm sure you're right, it's 3.14159 and not 2.71828; they'll see what we've done.",
    "Größe und Maß, naïve café, Ünïcödé, 東京 と 大阪, العربية ١٢, 🙂🙃 and the rest of the text",
    "the then there these those this that with without within, and over and under and after   all\t\tof it",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CHATML_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPM_SPECIALS = ["<unk>", "<s>", "</s>"]
TEXTS = [
    "",
    " ",
    "Hello there, the capital",
    "  two blanks in front and behind  ",
    "I'm you're  3.14  and 1,234.56\n\n\n  x",
    "tabs\t\tand\r\nlines \n",
    "Größe naïve é vs e\u0301 🙂 東京　大阪 العربية ١٢",
    "<|im_start|>user\nhi <|im_end|> there<|im_start|>",
    "<s>a</s> b<s> c <unk>x",
]


@cache
def smollm2() -> tuple[dict[str, Any], Path]:
    """The metadata and the path of the real model's file."""
    path = resolve_model("smollm2-135m-instruct")
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith(("tokenizer.", "general."))}, path


@cache
def _trained_model(byte_level: bool, num_tokens: int) -> dict[str, Any]:
    """Vocabulary and merges, without special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        alphabet = []
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


def byte_level(specials: list[str] | None = None) -> tokenizers.Tokenizer:
    """GPT-2's pipeline, with the special tokens first."""
    specials = CHATML_SPECIALS if specials is None else specials
    model = _trained_model(True, 420)
    words = [*specials, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    vocab = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge) for merge in model["merges"]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return backend


def sentence_piece(adds_bos: bool = True) -> tokenizers.Tokenizer:
    """Llama 2's pipeline: prefix space, byte tokens, BOS by the post-processor. No character of 東京 is a token."""
    model = _trained_model(False, 300)
    known = sorted(model["vocab"], key=model["vocab"].__getitem__)
    words = [*SPM_SPECIALS, *BYTE_TOKENS, *(word for word in known if not set(word) & set("東京🙂🙃"))]
    vocab = {word: index for index, word in enumerate(words)}
    merges = [(a, b) for a, b in model["merges"] if a in vocab and b in vocab and a + b in vocab]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPM_SPECIALS])
    return backend


def gguf_metadata(backend: tokenizers.Tokenizer, model: str, **more: Any) -> dict[str, Any]:
    """What a converter writes for `backend`; `more` adds keys below tokenizer.ggml."""
    state = json.loads(backend.to_str())
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    kinds = [3 if token in special else 6 if token in BYTE_TOKENS else 1 for token in tokens]
    values: dict[str, Any] = {"model": model, "tokens": tokens, "token_type": kinds}
    if model == "gpt2":
        values["merges"] = [" ".join(merge) for merge in state["model"]["merges"]]
    else:
        values["scores"] = [0.0 if kind != 1 else -float(index) for index, kind in enumerate(kinds)]
    return {f"tokenizer.ggml.{key}": value for key, value in (values | more).items()}
