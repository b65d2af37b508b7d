"""`Tokenizer`, `TextStream` and `StopStrings`: ids of the real model, streams equal to `decode`, stops for any cut."""

from __future__ import annotations

import json
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from mpiinfer.errors import MpiinferError, RequestError
from mpiinfer.text.detokenize import Detokenizer
from mpiinfer.text.tokenizer import StopStrings, Tokenizer
from tests.pure.sample_tokenizers import SPM_SPECIALS, byte_level, gguf_metadata, sentence_piece, smollm2

FIXTURES = Path(__file__).parent.parent / "fixtures"
CASES: list[dict[str, Any]] = json.loads((FIXTURES / "smollm2_tokenizer.json").read_text())


@cache
def real() -> Tokenizer:
    return Tokenizer.from_gguf(*smollm2())


@cache
def spm() -> Tokenizer:
    metadata = gguf_metadata(sentence_piece(), "llama")
    return Tokenizer.from_gguf(metadata, Path("spm.gguf"))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push(token_id) for token_id in ids) + stream.finish()


def folder(path: Path, backend: Any, **config: Any) -> Tokenizer:
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["text"]))
def test_real_model_gives_the_reference_ids(case: dict[str, Any]) -> None:
    assert real().encode(case["text"]) == case["token_ids"]
    assert real().encode(case["text"], add_special=False) == case["token_ids"]


def test_real_model_has_its_facts() -> None:
    assert real().vocab_size == 49152
    assert real().bos_token_id == 1
    assert real().eos_token_ids == frozenset({2})


def test_real_model_is_built_in_a_moment() -> None:
    metadata, path = smollm2()
    start = time.perf_counter()
    Tokenizer.from_gguf(metadata, path)
    assert time.perf_counter() - start < 1.5


def test_real_model_renders_its_chat_template() -> None:
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    prompt = real().apply_chat(messages)
    assert prompt.endswith("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.startswith("<|im_start|>system\n")
    ids = real().encode_chat(messages)
    assert ids[0] == 1 and ids[:2] != [1, 1]
    assert ids == real().encode(prompt)


# The vocabulary has no token for some control characters, nor for the bytes with which higher code points begin.
@given(st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])))
@settings(max_examples=60, deadline=None)
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert real().decode(real().encode(text)) == text
    assert streamed(real(), real().encode(text)) == text


@given(st.lists(st.integers(0, 49160), max_size=40))
@settings(max_examples=200, deadline=None)
def test_stream_equals_decode_for_any_ids_byte_level(ids: list[int]) -> None:
    assert streamed(real(), ids) == real().decode(ids)


byte_heavy = st.lists(st.one_of(st.integers(0, 2), st.integers(3, 258), st.integers(259, 600)), max_size=40)


@given(byte_heavy)
@settings(max_examples=300, deadline=None)
def test_stream_equals_decode_for_any_ids_with_byte_fallback(ids: list[int]) -> None:
    assert streamed(spm(), ids) == spm().decode(ids)


DECODERS = {
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "metaspace without prefix": decoders.Metaspace(prepend_scheme="never"),
    "metaspace, bytes": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]),
    "word pieces": decoders.WordPiece(),
    "strip three": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
    "strip each": decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]),
    "none": None,
}


@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_stream_equals_decode_for_any_decoder(name: str, clean_up: bool) -> None:
    backend = sentence_piece()
    if (decoder := DECODERS[name]) is not None:
        backend.decoder = decoder
    detokenizer = Detokenizer(backend, clean_up)

    @given(byte_heavy)
    @settings(max_examples=60, deadline=None)
    def check(ids: list[int]) -> None:
        stream = detokenizer.stream()
        assert "".join(stream.push(token_id) for token_id in ids) + stream.finish() == detokenizer.decode(ids)

    check()


def test_stream_gives_whole_characters_only() -> None:
    ids = real().encode("a🙂é東b")
    stream = real().stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) == "a🙂é東b"
    assert len(pieces) > 5 and "\ufffd" not in "".join(pieces)
    assert stream.finish() == ""


def test_stream_ends_with_a_replacement_for_half_a_character() -> None:
    ids = real().encode("🙂")
    stream = real().stream()
    assert [stream.push(token_id) for token_id in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.finish() == "\ufffd" == real().decode(ids[:-1])


def test_stream_skips_special_tokens_between_the_bytes_of_a_character() -> None:
    first, *rest = real().encode("é", add_special=False) if len(real().encode("é")) > 1 else real().encode("🙂")
    ids = [1, first, 2, *rest, 0]
    assert streamed(real(), ids) == real().decode(ids) == real().decode([first, *rest])


def test_stream_strips_the_prefix_space_once() -> None:
    ids = spm().encode("  the capital")
    assert spm().decode(ids) == streamed(spm(), ids) == "  the capital"
    assert spm().decode([1, *ids[1:]]) == streamed(spm(), [1, *ids[1:]])


def test_stream_costs_the_same_at_any_length() -> None:
    ids = real().encode("All the world's a stage, and all the men and women merely players. 🙂 " * 800)
    quarter = len(ids) // 4

    def growth() -> float:
        stream = real().stream()
        times = []
        for at in range(0, 4 * quarter, quarter):
            start = time.perf_counter()
            for token_id in ids[at : at + quarter]:
                stream.push(token_id)
            times.append(time.perf_counter() - start)
        return times[-1] / times[0]

    # Another process may take the core for a while: one quiet run of three is enough.
    assert min(growth() for _ in range(3)) < 2


@pytest.mark.parametrize("text", ["<s>the capital", "the capital", "<s><s>the"])
def test_bos_is_added_but_never_doubled(tmp_path: Path, text: str) -> None:
    bare = folder(tmp_path, sentence_piece(), bos_token="<s>")
    for tokenizer in (spm(), bare):
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert ids.count(1) == max(1, text.count("<s>"))
        assert tokenizer.encode(text, add_special=False).count(1) == text.count("<s>")


def test_bos_of_the_text_stays_where_none_is_added(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, sentence_piece(adds_bos=False), bos_token="<s>")
    assert tokenizer.encode("<s><s>the")[:3].count(1) == 2
    assert tokenizer.encode("the")[0] != 1


def test_chat_does_not_add_a_bos_of_its_own(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    with_bos = folder(tmp_path, sentence_piece(), bos_token="<s>", chat_template=template)
    assert with_bos.encode_chat([{"role": "user", "content": "the"}]).count(1) == 1
    without = folder(
        tmp_path, sentence_piece(), bos_token="<s>", chat_template=template.removeprefix("{{ bos_token }}")
    )
    assert without.encode_chat([{"role": "user", "content": "the"}]).count(1) == 0


@pytest.mark.parametrize(
    ("text", "reason"), [("ab\ud83d", "character 2 is half of a surrogate pair"), (None, "must be a string")]
)
def test_a_prompt_that_is_no_text_is_a_request_error(text: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        real().encode(text)


def test_chat_without_a_template_names_the_folder_and_the_fix(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, byte_level())
    with pytest.raises(RequestError, match="no chat template; send a prompt instead") as caught:
        tokenizer.apply_chat([{"role": "user", "content": "hi"}])
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_special_tokens_give_no_text() -> None:
    assert spm().decode([1, 0, 2]) == streamed(spm(), [1, 0, 2]) == ""
    assert all(token not in spm().decode(list(range(spm().vocab_size))) for token in SPM_SPECIALS)


def cut_naively(text: str, stops: list[str]) -> tuple[str, bool]:
    """Grow the text character by character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        ended = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(ended)], True
    return text, False


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_equal_a_naive_search_for_any_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    checker = StopStrings(stops)
    expected, is_found = cut_naively(text, stops)
    emitted = ""
    for piece in pieces:
        new, found = checker.push(piece)
        emitted += new
        assert expected.startswith(emitted)
        if found:
            break
    else:
        found = False
    assert (emitted + checker.finish(), found) == (expected, is_found)


def test_stop_strings_hold_back_no_more_than_they_must() -> None:
    checker = StopStrings(["\n\n", "END"])
    assert checker.push("one E") == ("one ", False)
    assert checker.push("N") == ("", False)
    assert checker.push("T\n") == ("ENT", False)
    assert checker.push("two\nEND three") == ("\ntwo\n", True)
    assert checker.push("four") == ("", True)
    assert checker.finish() == ""


def test_no_stop_strings_hold_nothing_back() -> None:
    checker = StopStrings([])
    assert checker.push("all of it") == ("all of it", False)
    assert checker.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], "END", [1]])
def test_stop_strings_must_be_strings_with_something_in_them(stops: Any) -> None:
    with pytest.raises(MpiinferError, match="stop: must be a list of strings that are not empty"):
        StopStrings(stops)
