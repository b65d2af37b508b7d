"""A Hugging Face folder gives the ids, texts and special tokens that transformers gives for its tokenizer.json."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

from mpiinfer.errors import ModelError
from mpiinfer.text.tokenizer import Tokenizer
from tests.pure.sample_tokenizers import TEXTS, byte_level, sentence_piece

reference: Any = transformers
reference.logging.set_verbosity_error()

CLASSES = (None, "PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer")
AS_IN_2023 = {
    "added_tokens_decoder": {
        "1": {"content": "<s>", "lstrip": False, "rstrip": True, "normalized": False, "special": False},
        "999": {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "special": False},
    },
    "bos_token": "<s>",
    "additional_special_tokens": ["<extra>"],
    "image_token": "<img>",
    "add_prefix_space": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "legacy": {"legacy": True},
    "adds both": {
        "add_bos_token": True,
        "add_eos_token": True,
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False},
        "pad_token": "<|im_end|>",
    },
    "as in 2023": AS_IN_2023,
}


def write(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def assert_equal_to_transformers(path: Path) -> None:
    """But for one thing: where the text brings BOS, transformers puts a second before it."""
    theirs = reference.PreTrainedTokenizerFast.from_pretrained(path)
    ours = Tokenizer.from_folder(path)
    for text, special in itertools.product([*TEXTS, "a <new>  b<extra> <img> c <|im_end|> d"], (True, False)):
        expected = theirs.encode(text, add_special_tokens=special)
        if special and expected[:2] == [theirs.bos_token_id] * 2:
            del expected[0]
        assert ours.encode(text, add_special=special) == expected, (text, special)
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == ({theirs.eos_token_id} - {None})
    chance = random.Random(0)
    for _ in range(12):
        ids = [chance.randrange(len(theirs) + 3) for _ in range(chance.randrange(12))]
        stream = ours.stream()
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert "".join(stream.push(token_id) for token_id in ids) + stream.finish() == ours.decode(ids)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece"])
def test_ids_equal_transformers(tmp_path: Path, kind: str, config: str) -> None:
    backend = byte_level() if kind == "byte-level" else sentence_piece()
    for name in CLASSES:
        declared = {} if name is None else {"tokenizer_class": name}
        assert_equal_to_transformers(write(tmp_path / "model", backend, CONFIGS[config] | declared))


@pytest.mark.parametrize("name", [None, "TokenizersBackend", "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_digits_stand_alone_where_tokenizer_json_says_so(tmp_path: Path, name: str | None) -> None:
    """Whatever the class: transformers 5 drops the file's rule for some of them."""
    backend = byte_level()
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    declared = {} if name is None else {"tokenizer_class": name}
    path = write(tmp_path / "model", backend, declared)
    assert_equal_to_transformers(path)
    tokenizer = Tokenizer.from_folder(path)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("123")] == ["1", "2", "3"]


def test_old_folders_spread_their_tokens_over_files(tmp_path: Path) -> None:
    path = write(tmp_path / "model", sentence_piece(), {"tokenizer_class": "PreTrainedTokenizerFast"})
    bos = {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    more = {"bos_token": bos, "eos_token": "</s>", "additional_special_tokens": ["<extra>"]}
    (path / "special_tokens_map.json").write_text(json.dumps(more))
    (path / "added_tokens.json").write_text(json.dumps({"<new>": 700, "</s>": 2}))
    assert_equal_to_transformers(path)


def test_folder_saved_by_transformers(tmp_path: Path) -> None:
    saved = reference.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    saved.save_pretrained(tmp_path / "model")
    assert_equal_to_transformers(tmp_path / "model")


def test_padding_and_truncation_of_tokenizer_json_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_padding(length=64, pad_token="<|endoftext|>")
    backend.enable_truncation(4)
    assert_equal_to_transformers(write(tmp_path / "model", backend, {}))


def test_special_tokens_stay_text_where_the_folder_says_so(tmp_path: Path) -> None:
    assert_equal_to_transformers(write(tmp_path / "model", byte_level(), {"split_special_tokens": True}))


def test_clean_up_of_spaces_follows_the_model(tmp_path: Path) -> None:
    words = {word: index for index, word in enumerate(["[UNK]", "it", "'", "s", ".", "do", "n't", "!"])}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = write(tmp_path / "model", backend, {"clean_up_tokenization_spaces": True})
    assert_equal_to_transformers(path)
    assert Tokenizer.from_folder(path).decode([1, 2, 3, 5, 6, 7, 4]) == "it's don't!."
    assert_equal_to_transformers(write(path, byte_level(), {"clean_up_tokenization_spaces": True}))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tokenizer.json", None, "no tokenizer.json; save one there"),
        ("tokenizer.json", "version https://git-lfs", "tokenizer.json: the tokenizers library cannot read it"),
        ("tokenizer.json", '{"model": {}}', "tokenizer.json: the tokenizers library cannot read it"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: must hold a JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}', "tokenizer_config.json: malformed entry"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "tokenizer_config.json: malformed entry"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": {"content": "a"}}}',
            "tokenizer_config.json: malformed entry .ValueError",
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": ""}]}',
            "no template named 'default'",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_names_the_file(tmp_path: Path, name: str, text: str | None, reason: str) -> None:
    path = write(tmp_path / "model", byte_level(), {})
    (path / name).unlink() if text is None else (path / name).write_text(text)
    with pytest.raises(ModelError, match=reason) as caught:
        Tokenizer.from_folder(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
