"""Where each tensor of a checkpoint stands: file, first byte, shape and encoding. Read from headers, never from data.

Promises: a `CheckpointIndex` names bytes that are there: every file exists, every tensor lies inside its file, none
overlaps another, none is stored twice. Refuses to know which tensors the model needs, and imports no torch.

Format of a safetensors file: 8 bytes with the length of the header, little-endian; the header, JSON, {name: {dtype,
shape, data_offsets: [begin, end]}}, offsets counted from the end of the header; then the data, without holes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from mpiinfer.errors import CheckpointError
from mpiinfer.weights.encodings import DENSE, Encoding

INDEX_NAME = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000
AGAIN = "copy or download the file again"


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One stored tensor, row-major.

    name: canonical. stored_name: as in the file. offset: of its first byte in the file. shape: outermost dim first.
    paired_head_dim: 0, or the size of the heads whose rows stand in the order of rotated neighbours: stored row 2i
    of a head is row i of the model's, 2i + 1 is row i + paired_head_dim / 2.
    """

    name: str
    stored_name: str
    file: Path
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    encoding: Encoding
    paired_head_dim: int = 0

    @property
    def stop(self) -> int:
        return self.offset + self.num_bytes

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.stored_name!r}"


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors of a checkpoint by canonical name. `where`: the folder or file that errors name."""

    where: Path
    entries: Mapping[str, TensorEntry]


def read_folder_index(folder: Path) -> CheckpointIndex:
    """The tensors of a Hugging Face folder: one safetensors file, or several with or without an index.

    Without an index, all files named model*.safetensors are read (all *.safetensors where there are none of those).
    Raises CheckpointError naming file and tensor.
    """
    named = _named_by_index(folder / INDEX_NAME) if (folder / INDEX_NAME).exists() else None
    files = _files_without_index(folder) if named is None else sorted(set(named.values()))
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for entry in read_safetensors(folder / file):
            if entry.name in entries:
                other = entries[entry.name].file.name
                raise CheckpointError(f"{entry} is in {other} too: keep one of the two files, or give an {INDEX_NAME}")
            entries[entry.name] = entry
    for name, file in (named or {}).items():
        if name not in entries or entries[name].file != folder / file:
            raise CheckpointError(f"{folder / file}: tensor {name!r} is not in it, as {INDEX_NAME} says: {AGAIN}")
    return CheckpointIndex(folder, entries)


def read_safetensors(file: Path) -> Iterator[TensorEntry]:
    """The tensors of one safetensors file in the order of their bytes, from its header alone.

    Raises CheckpointError where the header is damaged, the data truncated, or a dtype not supported.
    """
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            header_bytes = int.from_bytes(stream.read(8), "little")
            if file_bytes < 8 or header_bytes > file_bytes - 8:
                raise CheckpointError(
                    f"{file}: truncated, or not safetensors: its {file_bytes} bytes do not hold the header: {AGAIN}"
                )
            if header_bytes > _LARGEST_HEADER:
                raise CheckpointError(f"{file}: not safetensors: a header of {header_bytes} bytes is not possible")
            header = _parse_header(file, stream.read(header_bytes))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
    header.pop("__metadata__", None)
    entries = sorted((_entry(file, 8 + header_bytes, name, value) for name, value in header.items()), key=_bytes_of)
    check_bytes(file, entries, file_bytes)
    _check_no_holes(file, entries, 8 + header_bytes, file_bytes)
    yield from entries


def check_bytes(file: Path, entries: Iterable[TensorEntry], file_bytes: int) -> None:
    """Raise CheckpointError where a tensor ends behind the file's end or overlaps another."""
    ordered = sorted(entries, key=_bytes_of)
    for entry in ordered:
        if entry.stop > file_bytes:
            raise CheckpointError(
                f"{entry} ends at byte {entry.stop}, but the file is truncated to {file_bytes}: {AGAIN}"
            )
    for entry, following in pairwise(ordered):
        if entry.stop > following.offset:
            raise CheckpointError(f"{entry} overlaps tensor {following.stored_name!r}: the header is damaged: {AGAIN}")


def read_json(file: Path, error: type[Exception] = CheckpointError) -> dict[str, Any]:
    """A file that holds one JSON object; raises `error` naming the file where it does not."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{file}: cannot be read: {problem.strerror or problem}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{file}: not valid JSON: {_line(problem)}") from None
    if not isinstance(value, dict):
        raise error(f"{file}: must hold a JSON object, not {type(value).__name__}")
    return value


def _bytes_of(entry: TensorEntry) -> tuple[int, int]:
    return entry.offset, entry.stop


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split())


def _named_by_index(index_file: Path) -> dict[str, str]:
    """Tensor -> file name, as the index has it; every file exists."""
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index_file}: needs the key 'weight_map', an object of tensor names and file names")
    for name, file in weight_map.items():
        if not (index_file.parent / file).is_file():
            raise CheckpointError(f"{index_file.parent / file}: missing, but {INDEX_NAME} has tensor {name!r} in it")
    return weight_map


def _files_without_index(folder: Path) -> list[str]:
    """The safetensors files of a folder, which, where they are numbered "3 of 7", are all there."""
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    files = [file for file in files if file.startswith("model")] or files
    if not files:
        raise CheckpointError(_without_safetensors(folder))
    numbered = [match for file in files if (match := re.fullmatch(r"(.+-)(\d+)(-of-)(\d+)(\.safetensors)", file))]
    for match in numbered:
        start, number, of, total, suffix = match.groups()
        for other in range(1, int(total) + 1):
            name = f"{start}{other:0{len(number)}}{of}{total}{suffix}"
            if name not in files:
                raise CheckpointError(f"{folder / name}: missing, but {match[0]} is there: {AGAIN}")
    return files


def _without_safetensors(folder: Path) -> str:
    pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}"))
    if pickled:
        return (
            f"{folder}: only has {pickled[0]}, which is not read: convert it to safetensors (load the folder with "
            "transformers and save_pretrained it to another)"
        )
    return f"{folder}: holds no .safetensors file: a model folder needs config.json and its weights as safetensors"


def _parse_header(file: Path, raw: bytes) -> dict[str, Any]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{file}: tensor {twice!r} is in the header twice: {AGAIN}")
        return values

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not safetensors: its header is not valid JSON: {_line(error)}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not safetensors: its header is not a JSON object")
    return header


def _entry(file: Path, data_start: int, name: str, value: Any) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CheckpointError(f"{file}: tensor {name!r}: the header must give dtype, shape and two data_offsets")
    if dtype not in DENSE:
        known = ", ".join(DENSE)
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {dtype}; known are {known}: convert it to one of them"
        )
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise CheckpointError(f"{file}: tensor {name!r}: shape {shape} is not a list of sizes: {AGAIN}")
    needed = prod(shape) * DENSE[dtype].block_bytes
    if begin < 0 or end - begin != needed:
        raise CheckpointError(
            f"{file}: tensor {name!r}: bytes {begin} to {end} do not hold {dtype} of shape {shape} ({needed} bytes)"
        )
    return TensorEntry(
        name=name,
        stored_name=name,
        file=file,
        offset=data_start + begin,
        num_bytes=needed,
        shape=tuple(shape),
        encoding=DENSE[dtype],
    )


def _check_no_holes(file: Path, entries: list[TensorEntry], data_start: int, file_bytes: int) -> None:
    at = data_start
    for entry in entries:
        if entry.offset != at:
            raise CheckpointError(f"{entry}: {entry.offset - at} bytes before it belong to no tensor: {AGAIN}")
        at = entry.stop
    if at != file_bytes:
        raise CheckpointError(f"{file}: its last {file_bytes - at} bytes belong to no tensor: {AGAIN}")
