"""GGUF headers: keys of every type, tensors, names, and one line for each way in which a file is broken."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from mpiinfer.errors import CheckpointError
from mpiinfer.weights.encodings import GGUF_ENCODINGS
from mpiinfer.weights.gguf import GgufHeader, canonical_name, gguf_name, read_gguf
from tests.checkpoint_files import GgufBytes, tensors_of, tiny_config


def refused(file: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_gguf(file)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500 and str(file) in text
    return text


def array(kind: int, fmt: str, *values: object) -> bytes:
    return struct.pack(f"<IQ{len(values)}{fmt}", kind, len(values), *values)


def test_keys_of_every_type(tmp_path: Path) -> None:
    parts = GgufBytes()
    formats = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
    for kind, fmt in formats.items():
        parts.key(f"int{kind}", kind, struct.pack("<" + fmt, 7))
    parts.key("f32", 6, struct.pack("<f", 0.5)).key("f64", 12, struct.pack("<d", 0.1)).key("yes", 7, b"\x01")
    parts.key("text", 8, parts.string("größe")).key("ints", 9, array(5, "i", -1, 2)).key("none", 9, array(5, "i"))
    words = ["a", "", "ö" * 40] * 40_000  # longer than one window
    parts.key("words", 9, struct.pack("<IQ", 8, len(words)) + b"".join(map(parts.string, words)))
    parts.key("after", 7, b"\x00")
    header = read_gguf(parts.write(tmp_path / "m.gguf"))
    assert all(header.metadata[f"int{kind}"] == 7 for kind in formats)
    assert header.metadata["f32"] == 0.5 and header.metadata["f64"] == 0.1 and header.metadata["yes"] is True
    assert header.metadata["text"] == "größe" and header.metadata["ints"] == [-1, 2] and header.metadata["none"] == []
    assert header.metadata["words"] == words and header.metadata["after"] is False


@pytest.mark.parametrize("alignment", [32, 64])
def test_tensors(tmp_path: Path, alignment: int) -> None:
    parts = GgufBytes().key("general.alignment", 4, struct.pack("<I", alignment))
    parts.tensor("token_embd.weight", (3, 64), kind=3, offset=64).tensor("output_norm.weight", (5,), offset=0)
    file = parts.write(tmp_path / "m.gguf", 64 + 120, alignment)
    tensors = read_gguf(file).tensors
    start = file.stat().st_size - 184
    assert start % alignment == 0
    table = tensors["token_embd.weight"]
    assert table.name == "model.embed_tokens.weight" and table.shape == (3, 64) and table.encoding.name == "Q4_1"
    assert table.offset == start + 64 and table.num_bytes == 120
    assert tensors["output_norm.weight"].num_bytes == 20


def test_every_name_of_a_model_goes_both_ways() -> None:
    config = tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
    for name in tensors_of(config):
        assert gguf_name(name) != name and canonical_name(gguf_name(name)) == name
    assert canonical_name("blk.3.attn_qkv.weight") == "blk.3.attn_qkv.weight"


def test_only_query_and_key_of_llama_are_paired(tmp_path: Path) -> None:
    parts = GgufBytes()
    names = [gguf_name(name) for name in tensors_of(tiny_config(qkv_bias=True))]
    for at, name in enumerate(names):
        parts.tensor(name, (20,), offset=at * 80)
    header = read_gguf(parts.write(tmp_path / "m.gguf", 80 * len(names)))
    paired = {e.stored_name for e in header.index(tiny_config()).entries.values() if e.paired_head_dim}
    assert paired == {f"blk.{i}.attn_{x}.{kind}" for i in range(2) for x in "qk" for kind in ("weight", "bias")}
    assert not any(e.paired_head_dim for e in header.index(tiny_config(family="qwen2")).entries.values())


def test_rope_factors_are_values_and_no_tensor(tmp_path: Path) -> None:
    file = GgufBytes().tensor("rope_freqs.weight", (2,)).write(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes() + struct.pack("<2f", 1.0, 8.0))
    header = read_gguf(file)
    assert header.rope_factors() == (1.0, 8.0) and header.index(tiny_config()).entries == {}
    assert GgufHeader(file, {}, {}).rope_factors() == ()
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight.*F16"):
        read_gguf(GgufBytes().tensor("rope_freqs.weight", (2,), kind=1).write(file, 4)).rope_factors()


def test_not_gguf(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGML" + bytes(100))
    assert "not a GGUF file" in refused(file)
    file.write_bytes(b"GG")
    assert "not a GGUF file" in refused(file)


@pytest.mark.parametrize(
    ("version", "problem"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")], ids=["1", "4", "big"]
)
def test_version(tmp_path: Path, version: int, problem: str) -> None:
    assert problem in refused(GgufBytes(version).write(tmp_path / "m.gguf"))


def test_truncated_anywhere(tmp_path: Path) -> None:
    parts = GgufBytes().key("a", 8, GgufBytes.string("text")).key("b", 9, array(4, "I", 1, 2))
    whole = parts.tensor("output_norm.weight", (5,)).write(tmp_path / "whole.gguf", 20).read_bytes()
    file = tmp_path / "m.gguf"
    for kept in range(24, len(parts.header())):
        file.write_bytes(whole[:kept])
        assert "truncated: the header" in refused(file)
    for kept in (len(parts.header()), len(whole) - 1):
        file.write_bytes(whole[:kept])
        text = refused(file)
        assert "tensor 'output_norm.weight'" in text and "truncated" in text


def test_lengths_that_no_file_has(tmp_path: Path) -> None:
    huge = struct.pack("<IQ", 6, 1 << 62)
    assert "truncated" in refused(GgufBytes().key("a", 9, huge).write(tmp_path / "m.gguf"))
    assert "truncated" in refused(GgufBytes().key("a", 8, struct.pack("<Q", 1 << 62)).write(tmp_path / "m.gguf"))


def test_types(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    text = refused(GgufBytes().tensor("output.weight", (32,), kind=99).write(file))
    assert "'output.weight' has the unknown type 99" in text and "Q4_1" in text
    assert "'output.weight' has type Q8_K" in refused(GgufBytes().tensor("output.weight", (256,), kind=15).write(file))
    text = refused(GgufBytes().tensor("output.weight", (2, 33), kind=3).write(file))
    assert "'output.weight'" in text and "no whole Q4_1 blocks of 32" in text
    assert "key 'a' has the unknown type 13" in refused(GgufBytes().key("a", 13, bytes(8)).write(file))
    assert "array of the unknown type 9" in refused(GgufBytes().key("a", 9, array(9, "I", 0)).write(file))


def test_damaged_tensors(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    twice = GgufBytes().tensor("x", (1,)).tensor("x", (1,), offset=32)
    assert "tensor 'x' is in the header twice" in refused(twice.write(file, 64))
    overlap = GgufBytes().tensor("x", (8,)).tensor("y", (8,), offset=16)
    assert "'x' overlaps tensor 'y'" in refused(overlap.write(file, 64))
    assert "7 dims" in refused(GgufBytes().tensor("x", (1,) * 7).write(file))
    assert "key 'a' is in the header twice" in refused(GgufBytes().key("a", 7, b"\0").key("a", 7, b"\0").write(file))
    assert "UTF-8" in refused(GgufBytes().key("a", 8, struct.pack("<Q", 1) + b"\xff").write(file))
    assert "one of 3 parts" in refused(GgufBytes().key("split.count", 2, struct.pack("<H", 3)).write(file))
    zero = GgufBytes().key("general.alignment", 4, struct.pack("<I", 0))
    assert "general.alignment = 0" in refused(zero.write(file))


def test_types_are_those_of_the_gguf_package() -> None:
    quants = pytest.importorskip("gguf.quants")
    dequantisable = {kind.name for kind in quants._type_traits} | {"F32", "F16"}
    known = {encoding.name: (number, encoding) for number, encoding in GGUF_ENCODINGS.items()}
    assert dequantisable <= set(known)
    for kind in quants.GGMLQuantizationType:
        if kind.name in known:
            number, encoding = known[kind.name]
            assert number == kind.value
            assert (encoding.block, encoding.block_bytes) == quants.GGML_QUANT_SIZES[kind]
