"""Tokenizers out of GGUF metadata: llama.cpp's splits, merges, special tokens and defaults; errors name the key."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiinfer.errors import ModelError
from mpiinfer.text import gguf as gguf_tokenizer
from mpiinfer.text.tokenizer import Tokenizer
from tests.pure.sample_tokenizers import BYTE_TOKENS, TEXTS, byte_level, gguf_metadata, sentence_piece, smollm2

FILE = Path("some/model.gguf")
ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet


def words(pre: str, text: str) -> list[str]:
    """`text` as the rule `pre` splits it: bytes alone are tokens, so a word is a run of ids in one piece."""
    backend = gguf_tokenizer.build_tokenizer(bytes_only(pre), FILE).backend
    assert backend.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


def bytes_only(pre: str | None, **more: Any) -> dict[str, Any]:
    tokens = ["<|end|>", *sorted(ALPHABET())]
    values = {"model": "gpt2", "tokens": tokens, "token_type": [3] + [1] * 256, "merges": [], "bos_token_id": 0} | more
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()} | (
        {} if pre is None else {"tokenizer.ggml.pre": pre}
    )


TEXT = "I'M you're  3.14159 x²\n\n y"
SPLITS = {
    "gpt-2": ["I", "'", "M", " you", "'re", " ", " 3", ".", "14159", " x", "²", "\n\n", " y"],
    "smollm": ["I", "'", "M", " you", "'re", "  ", "3", ".", *"14159", " x", "²", "\n\n", " y"],
    "llama-bpe": ["I", "'M", " you", "'re", " ", " ", "3", ".", "141", "59", " x", "²", "\n\n", " y"],
    "qwen2": ["I", "'M", " you", "'re", " ", " ", "3", ".", *"14159", " x", "²", "\n\n", " y"],
    "tekken": ["I", "'M", " you", "'re", " ", " ", "3", ".", *"14159", " x", "²", "\n\n", " y"],
    "gpt-4o": ["I'M", " you're", " ", " ", "3", ".", "141", "59", " x", "²", "\n\n", " y"],
    "falcon": ["I", "'", "M", " you", "'", "re", " ", " 3", ".", "141", "59", " x", "²", "\n\n", " y"],
    "default": ["I", "'", "M", " you", "'", "re", " ", " ", "3", ".", "141", "59", " x", "²", "\n\n", " y"],
    "deepseek-coder": ["I", "'", "M", " you", "'", "re", "  ", "3", ".", *"14159", " x", "²", "\n", "\n", " y"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_split_follows_the_file(pre: str) -> None:
    assert words(pre, TEXT) == SPLITS[pre]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("llama-bpe", "1234567 ab,\n\n", ["123", "456", "7", " ab", ",\n\n"]),
        ("llama-bpe", "DON'T\r\n  x", ["DON", "'T", "\r\n", " ", " x"]),
        ("qwen2", "a\t\tb \n c", ["a", "\t", "\tb", " \n", " c"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        ("qwen35", "हिन्दी", ["हिन्दी"]),
        ("tekken", "HelloWorld IBMPc /x/\n/y", ["Hello", "World", " IBMPc", " /", "x", "/\n/", "y"]),
        ("tekken", "éÉa", ["éÉa"]),
        ("gpt-4o", "HelloWorld'S", ["Hello", "World'S"]),
        ("deepseek-coder", "x東京　한국 1", ["x", "東京", "　", "한국", " ", "1"]),
        ("starcoder", " 12 ١٢", [" ", "1", "2", " ", "١", "٢"]),
    ],
)
def test_split_details(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


@pytest.mark.parametrize("pre", sorted(gguf_tokenizer._SPLITS))
def test_every_rule_keeps_every_character(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(bytes_only(pre), FILE)
    for text in [*TEXTS, TEXT]:
        assert "".join(words(pre, text)) == text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a")[0] == (0 if gguf_tokenizer._SPLITS[pre].adds_bos else tokenizer.encode("a")[-1])


def test_a_word_that_is_a_token_skips_the_merges_where_the_rule_says_so() -> None:
    tokens = ["<|end|>", *sorted(ALPHABET()), "ab", "bc", "abc"]
    changes: dict[str, Any] = {"tokens": tokens, "token_type": [3] + [1] * 259, "add_bos_token": False}
    merges = ["b c", "a b", "ab c"]
    whole = Tokenizer.from_gguf(bytes_only("llama-bpe", merges=merges, **changes), FILE).encode("abc")
    merged = Tokenizer.from_gguf(bytes_only("qwen2", merges=merges, **changes), FILE).encode("abc")
    assert whole == [259]
    assert merged == [tokens.index("a"), tokens.index("bc")]


def test_special_tokens_are_found_before_the_split() -> None:
    backend = byte_level(["<|end|>", "<think>", "  "])
    kinds = gguf_metadata(backend, "gpt2")["tokenizer.ggml.token_type"]
    kinds[1:3] = [4, 4]
    metadata = gguf_metadata(backend, "gpt2", pre="gpt-2", token_type=kinds)
    tokenizer = Tokenizer.from_gguf(metadata, FILE)
    ids = tokenizer.encode("the<think>the  <|end|>")
    assert [token_id for token_id in ids if token_id < 3] == [1, 2, 0]
    assert tokenizer.decode(ids) == "the<think>the  "


def test_ids_that_end_an_output() -> None:
    tokenizer = Tokenizer.from_gguf(bytes_only("gpt-2", eos_token_id=0, eot_token_id=5, eom_token_id=7), FILE)
    assert tokenizer.eos_token_ids == {0, 5, 7}
    assert Tokenizer.from_gguf(bytes_only("gpt-2", eos_token_id=999), FILE).eos_token_ids == frozenset()
    assert Tokenizer.from_gguf(gguf_metadata(sentence_piece(), "llama"), FILE).eos_token_ids == {2}


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("adds_eos", [True, False])
def test_bos_and_eos_as_the_file_says(adds_bos: bool, adds_eos: bool) -> None:
    more: dict[str, Any] = {"add_bos_token": adds_bos, "add_eos_token": adds_eos, "eos_token_id": 0}
    for pre in ("llama-bpe", "gpt-2"):
        tokenizer = Tokenizer.from_gguf(bytes_only(pre, **more), FILE)
        plain = tokenizer.encode("ab", add_special=False)
        assert tokenizer.encode("ab") == [0] * adds_bos + plain + [0] * adds_eos
        assert tokenizer.encode("<|end|>ab") == [0] + plain + [0] * adds_eos


def test_chat_template_of_the_file_knows_its_tokens() -> None:
    metadata = gguf_metadata(sentence_piece(), "llama", padding_token_id=2)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}"
    tokenizer = Tokenizer.from_gguf(metadata, FILE)
    assert tokenizer.apply_chat([{"role": "user", "content": "the"}]) == "<s>the</s></s>"
    assert tokenizer.encode_chat([{"role": "user", "content": "the"}])[0] == 1


def test_phi_3_drops_blanks_after_its_special_tokens() -> None:
    metadata = gguf_metadata(sentence_piece(), "llama", add_bos_token=False)
    plain = Tokenizer.from_gguf(metadata, FILE)
    phi = Tokenizer.from_gguf(metadata | {"general.name": "Phi-3 Mini"}, FILE)
    assert phi.encode("</s>  the") == plain.encode("</s>the") != plain.encode("</s>  the")
    assert phi.encode("<s>  the") == plain.encode("<s>  the")


def merged_naively(metadata: dict[str, Any], text: str) -> list[int]:
    """llama.cpp's way with SentencePiece vocabularies, without special tokens: join the pair whose token scores
    highest, leftmost first, until no pair is a token; then bytes for what is none."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    symbols = list((" " + text).replace(" ", "▁")) if text else []
    while True:
        joined = [(ids[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not joined:
            break
        _, at = max(joined, key=lambda pair: (scores[pair[0]], -pair[1]))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    spelled = [[ids[s]] if s in ids else [ids[BYTE_TOKENS[byte]] for byte in s.encode()] for s in symbols]
    return [token_id for part in spelled for token_id in part]


SPM = gguf_metadata(sentence_piece(), "llama", add_bos_token=False)


@cache
def spm() -> Tokenizer:
    return Tokenizer.from_gguf(SPM, FILE)


@given(st.one_of(st.text("the capitl of\né🙂東  ", max_size=40), st.text(max_size=20)))
@settings(max_examples=200, deadline=None)
def test_sentence_piece_equals_a_naive_merge(text: str) -> None:
    assert spm().encode(text) == merged_naively(SPM, text)
    assert spm().decode(spm().encode(text)) == text.replace("▁", " ")


def test_sentence_piece_puts_the_prefix_space_before_each_stretch_of_text() -> None:
    blank = SPM["tokenizer.ggml.tokens"].index("▁")
    assert spm().encode("x</s>x") == [*spm().encode("x"), 2, *spm().encode("x")]
    without = Tokenizer.from_gguf(SPM | {"tokenizer.ggml.add_space_prefix": False}, FILE)
    assert without.encode("X") == spm().encode("X")[1:]
    assert spm().encode("X")[0] == blank
    assert without.decode(without.encode("  x")) == "  x"


def test_byte_fallback() -> None:
    ids = spm().encode("東")
    assert [SPM["tokenizer.ggml.tokens"][token_id] for token_id in ids[1:]] == ["<0xE6>", "<0x9D>", "<0xB1>"]


def without(metadata: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name != f"tokenizer.ggml.{key}"}


@pytest.mark.parametrize(
    ("metadata", "key", "reason"),
    [
        ({}, "tokens", "missing, so the file has no tokenizer"),
        (bytes_only("gpt-2", model="rwkv"), "model", "'rwkv' is not supported, only 'gpt2' and 'llama' are"),
        (without(bytes_only("gpt-2"), "model"), "model", "None is not supported"),
        (bytes_only("gpt-3"), "pre", "'gpt-3' is unknown; convert the file again with one of: chatglm-bpe"),
        (bytes_only(None), "pre", "missing"),
        (bytes_only("gpt-2", token_type=[1]), "token_type", "1 entries for 257 tokens"),
        (without(bytes_only("gpt-2"), "merges"), "merges", "missing"),
        (bytes_only("gpt-2", merges=["a b"]), "merges", "out of vocabulary"),
        (bytes_only("gpt-2", tokens=["a", "b", "a"], token_type=[1] * 3), "tokens", "'a' stands there twice"),
        (without(bytes_only("llama-bpe"), "bos_token_id"), "bos_token_id", "missing, but the file wants it added"),
        (bytes_only("gpt-2", add_eos_token=True), "eos_token_id", "missing, but the file wants it added"),
        (without(SPM, "scores"), "scores", "missing"),
    ],
)
def test_errors_name_file_and_key(metadata: dict[str, Any], key: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        Tokenizer.from_gguf(metadata, FILE)
    assert str(caught.value).startswith(f"{FILE}: tokenizer.ggml.{key}: ")
    assert "\n" not in str(caught.value)


def test_real_file_names_its_rule() -> None:
    metadata, path = smollm2()
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    with pytest.raises(ModelError, match="'smollm3' is unknown"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "smollm3"}, path)
