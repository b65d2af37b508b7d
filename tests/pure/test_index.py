"""Headers of safetensors files and folders: what is there, and one line for each way of being broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpiinfer.errors import CheckpointError, MpiinferError
from mpiinfer.weights.index import INDEX_NAME, read_folder_index, read_safetensors
from tests.checkpoint_files import write_header, write_safetensors


def message(error: pytest.ExceptionInfo[MpiinferError]) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


def refused(file: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        list(read_safetensors(file))
    text = message(error)
    assert str(file) in text
    return text


def refused_folder(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_folder_index(folder)
    text = message(error)
    assert str(folder) in text
    return text


def entry_json(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_entries_are_absolute_and_in_order(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "model.safetensors", {"b": (3, 5), "a": (7,), "s": (), "none": (0, 4)}, "BF16")
    entries = {entry.name: entry for entry in read_safetensors(file)}
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert entries["b"].offset == start and entries["b"].num_bytes == 30 and entries["b"].shape == (3, 5)
    assert entries["a"].offset == start + 30 and entries["a"].stop == start + 44
    assert entries["s"].shape == () and entries["s"].num_bytes == 2 and entries["none"].num_bytes == 0
    assert entries["a"].encoding.name == "BF16" and entries["a"].file == file


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
def test_dense_dtypes(tmp_path: Path, dtype: str) -> None:
    (entry,) = read_safetensors(write_safetensors(tmp_path / "m.safetensors", {"a": (3,)}, dtype))
    assert entry.encoding.name == dtype


@pytest.mark.parametrize("dtype", ["I64", "U8"])
def test_other_dtypes_are_named(tmp_path: Path, dtype: str) -> None:
    text = refused(write_safetensors(tmp_path / "m.safetensors", {"a.weight": (3,)}, dtype))
    assert f"'a.weight' has dtype {dtype}" in text and "F32, F16, BF16, F64" in text


@pytest.mark.parametrize("kept", [0, 5, 8, 40])
def test_truncated_header(tmp_path: Path, kept: int) -> None:
    file = write_safetensors(tmp_path / "m.safetensors", {"a": (30,)})
    file.write_bytes(file.read_bytes()[:kept])
    assert "truncated" in refused(file)


def test_truncated_data_names_the_tensor(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "m.safetensors", {"a": (30,), "b": (30,)})
    file.write_bytes(file.read_bytes()[:-1])
    text = refused(file)
    assert "tensor 'b'" in text and "truncated" in text and str(file.stat().st_size) in text


def test_not_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "truncated, or not safetensors" in refused(file)


@pytest.mark.parametrize("header", ["{", "[1]", '{"a": {"dtype": "F32"', "\x00\x01", '{"a": NaN '])
def test_header_that_is_no_json_object(tmp_path: Path, header: str) -> None:
    assert "JSON" in refused(write_header(tmp_path / "m.safetensors", header, 0))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "shape"),
        ({"dtype": 3, "shape": [2], "data_offsets": [0, 8]}, "dtype"),
        (entry_json("F32", [-2], 0, 8), "not a list of sizes"),
        (entry_json("F32", [2], 0, 4), "do not hold F32 of shape [2] (8 bytes)"),
        (entry_json("F32", [2], 8, 0), "do not hold"),
        (entry_json("F32", [2], -8, 0), "do not hold"),
        (entry_json("F32", [2], 4, 12), "4 bytes before it belong to no tensor"),
        (entry_json("F32", [2], 400, 408), "truncated"),
    ],
)
def test_bad_entry_names_the_tensor(tmp_path: Path, value: dict[str, object], problem: str) -> None:
    text = refused(write_header(tmp_path / "m.safetensors", json.dumps({"x.weight": value}), 12))
    assert problem in text and "'x.weight'" in text


def test_overlap_hole_and_rest(tmp_path: Path) -> None:
    overlap = {"a": entry_json("F32", [2], 0, 8), "b": entry_json("F32", [2], 4, 12)}
    assert "'a' overlaps tensor 'b'" in refused(write_header(tmp_path / "o.safetensors", json.dumps(overlap), 12))
    hole = {"a": entry_json("F32", [1], 0, 4), "b": entry_json("F32", [1], 8, 12)}
    assert "tensor 'b': 4 bytes before" in refused(write_header(tmp_path / "h.safetensors", json.dumps(hole), 12))
    rest = {"a": entry_json("F32", [1], 0, 4)}
    assert "last 8 bytes" in refused(write_header(tmp_path / "r.safetensors", json.dumps(rest), 12))


def test_twice_in_one_header(tmp_path: Path) -> None:
    one = json.dumps(entry_json("F32", [1], 0, 4))
    text = refused(write_header(tmp_path / "m.safetensors", f'{{"a": {one}, "a": {one}}}', 4))
    assert "tensor 'a' is in the header twice" in text


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_single_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": (1,)})
    write_safetensors(tmp_path / "consolidated.safetensors", {"other": (1,)})
    assert set(read_folder_index(tmp_path).entries) == {"a"}


@pytest.mark.parametrize("with_index", [True, False])
def test_sharded(tmp_path: Path, with_index: bool) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_safetensors(tmp_path / names[0], {"a": (1,), "b": (2,)})
    write_safetensors(tmp_path / names[1], {"c": (3,)})
    if with_index:
        write_index(tmp_path, {"a": names[0], "b": names[0], "c": names[1]})
        write_safetensors(tmp_path / "model-of-somebody-else.safetensors", {"a": (1,)})
    index = read_folder_index(tmp_path)
    assert {name: entry.file.name for name, entry in index.entries.items()} == {
        "a": names[0],
        "b": names[0],
        "c": names[1],
    }


def test_shard_named_by_the_index_is_missing(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": (1,)})
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    text = refused_folder(tmp_path)
    assert f"{tmp_path / 'two.safetensors'}: missing" in text and "'b'" in text and INDEX_NAME in text


def test_numbered_shard_is_missing_without_an_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00003.safetensors", {"a": (1,)})
    write_safetensors(tmp_path / "model-00003-of-00003.safetensors", {"b": (1,)})
    assert f"{tmp_path / 'model-00002-of-00003.safetensors'}: missing" in refused_folder(tmp_path)


def test_index_names_a_tensor_that_its_file_does_not_have(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", {"a": (1,)})
    write_safetensors(tmp_path / "two.safetensors", {"b": (1,)})
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    text = refused_folder(tmp_path)
    assert f"{tmp_path / 'one.safetensors'}: tensor 'b' is not in it" in text and INDEX_NAME in text


@pytest.mark.parametrize("with_index", [True, False])
def test_tensor_in_two_files(tmp_path: Path, with_index: bool) -> None:
    write_safetensors(tmp_path / "model-a.safetensors", {"a": (1,), "twice.weight": (1,)})
    write_safetensors(tmp_path / "model-b.safetensors", {"b": (1,), "twice.weight": (1,)})
    if with_index:
        weight_map = {"a": "model-a.safetensors", "b": "model-b.safetensors", "twice.weight": "model-a.safetensors"}
        write_index(tmp_path, weight_map)
    text = refused_folder(tmp_path)
    assert "tensor 'twice.weight'" in text and "model-a.safetensors" in text and "model-b.safetensors" in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_bad_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_NAME).write_text(content)
    assert str(tmp_path / INDEX_NAME) in refused_folder(tmp_path)


def test_only_bin_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    text = refused_folder(tmp_path)
    assert "pytorch_model.bin" in text and "convert it to safetensors" in text


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert "no .safetensors file" in refused_folder(tmp_path)
