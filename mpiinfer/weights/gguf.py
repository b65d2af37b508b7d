"""A GGUF file's header: metadata into a plain dict, and where each tensor stands. Reads the header's bytes only.

Promises: little memory (a window of the header, never a map of the file), and an error of one line for a file that is
not GGUF, is cut off, or holds a type that cannot be decoded. Refuses to decode; imports neither torch nor gguf.

Format, all little-endian: "GGUF", version u32, number of tensors u64, number of keys u64; for each key a string, a
type u32 and a value; for each tensor its name, number of dims u32, dims u64 innermost first, type u32, offset u64
from the start of the data, which begins at the next multiple of general.alignment. A string is a u64 and its bytes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from mpiinfer.errors import CheckpointError
from mpiinfer.model.config import ROPE_FACTORS, ModelConfig
from mpiinfer.model.families import EMBEDDING, FAMILIES, FINAL_NORM, HEAD, layer_name
from mpiinfer.weights.encodings import GGUF_ENCODINGS, GGUF_UNREADABLE
from mpiinfer.weights.index import AGAIN, CheckpointIndex, TensorEntry, check_bytes

_VERSIONS = (2, 3)
_WINDOW_BYTES = 1 << 20
_MAX_DIMS = 4

_STRING, _ARRAY = 8, 9
# Value type -> struct format.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_ENDS = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PAIRED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


def canonical_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without one stays as it is, and will be unclaimed."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER_PARTS:
        return layer_name(int(match[1]), f"{_LAYER_PARTS[match[2]]}.{match[3]}")
    return _ENDS.get(name, name)


def gguf_name(name: str) -> str:
    """The inverse of `canonical_name`, for messages."""
    ends = {canonical: stored for stored, canonical in _ENDS.items()}
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    parts = {canonical: stored for stored, canonical in _LAYER_PARTS.items()}
    if match and match[2] in parts:
        return f"blk.{match[1]}.{parts[match[2]]}.{match[3]}"
    return ends.get(name, name)


@dataclass(frozen=True)
class GgufHeader:
    """`metadata`: key -> number, string, bool or list. `tensors`: GGUF name -> entry."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]

    def index(self, config: ModelConfig) -> CheckpointIndex:
        """The tensors by canonical name. `config` says whether and how query and key rows are paired."""
        family = next(family for family in FAMILIES if family.name == config.family)
        paired_head_dim = config.head_dim if family.gguf_rotates_pairs else 0
        entries: dict[str, TensorEntry] = {}
        for name, entry in self.tensors.items():
            if name != ROPE_FACTORS:
                paired = paired_head_dim if _PAIRED.fullmatch(name) else 0
                entries[entry.name] = replace(entry, paired_head_dim=paired)
        return CheckpointIndex(self.file, entries)

    def rope_factors(self) -> tuple[float, ...]:
        """The values of rope_freqs.weight, none where the file has no such tensor. Reads their bytes."""
        entry = self.tensors.get(ROPE_FACTORS)
        if entry is None:
            return ()
        head_dim = 2 * prod(entry.shape)
        if entry.encoding.name != "F32" or len(entry.shape) != 1 or head_dim > 1 << 16:
            raise CheckpointError(f"{entry} is {entry.encoding.name} of shape {list(entry.shape)}, not a row of F32")
        with self.file.open("rb") as stream:
            stream.seek(entry.offset)
            return struct.unpack(f"<{entry.shape[0]}f", stream.read(entry.num_bytes))


def read_gguf(file: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises CheckpointError naming the file, and the key or tensor where there is one.
    """
    try:
        with file.open("rb") as stream:
            return _read(file, _Cursor(file, stream))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None


class _Cursor:
    """Takes values off a file from its start on, through a window that moves."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self.file = file
        self.file_bytes = os.fstat(stream.fileno()).st_size
        self._stream = stream
        self._window = b""
        self._window_start = 0
        self._at = 0

    @property
    def position(self) -> int:
        return self._window_start + self._at

    def take(self, num_bytes: int) -> bytes:
        stop = self._at + num_bytes
        if stop > len(self._window):
            self._advance(num_bytes)
            stop = num_bytes
        taken = self._window[self._at : stop]
        self._at = stop
        return taken

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def string(self) -> str:
        length = int.from_bytes(self.take(8), "little")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.file}: a string before byte {self.position} is not UTF-8: {AGAIN}") from None

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.file}: key {key!r} has the unknown type {kind}: {AGAIN}")
        kind, length = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.file}: key {key!r} is an array of the unknown type {kind}: {AGAIN}")
        size = struct.calcsize("<" + _SCALARS[kind])
        return list(struct.unpack(f"<{length}{_SCALARS[kind]}", self.take(length * size)))

    def _advance(self, num_bytes: int) -> None:
        rest = self._window[self._at :]
        self._window_start, self._at = self.position, 0
        if self._window_start + num_bytes > self.file_bytes:
            raise CheckpointError(
                f"{self.file}: truncated: the header goes on behind the file's {self.file_bytes} bytes: {AGAIN}"
            )
        self._window = rest + self._stream.read(max(num_bytes - len(rest), _WINDOW_BYTES))
        if len(self._window) < num_bytes:
            raise CheckpointError(f"{self.file}: the file became shorter while it was read: {AGAIN}")


def _read(file: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.file_bytes < 24 or cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{file}: not a GGUF file: it does not begin with GGUF")
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{file}: a big-endian GGUF file is not supported: convert it to little-endian")
    if version not in _VERSIONS:
        raise CheckpointError(f"{file}: GGUF version {version} is not supported; known are 2 and 3: convert it again")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{file}: key {key!r} is in the header twice: {AGAIN}")
        metadata[key] = cursor.value(key, cursor.number("I"))
    num_parts = metadata.get("split.count", 1)
    if isinstance(num_parts, int) and num_parts > 1:
        raise CheckpointError(f"{file}: one of {num_parts} parts: merge them with llama-gguf-split --merge")
    entries = [_entry(file, cursor) for _ in range(num_tensors)]
    return GgufHeader(file, metadata, _placed(file, entries, _data_start(file, cursor, metadata), cursor.file_bytes))


def _entry(file: Path, cursor: _Cursor) -> TensorEntry:
    """One tensor; its offset still counts from the start of the data."""
    name = cursor.string()
    num_dims = cursor.number("I")
    if num_dims > _MAX_DIMS:
        raise CheckpointError(f"{file}: tensor {name!r} has {num_dims} dims, at most {_MAX_DIMS} are possible: {AGAIN}")
    shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
    kind, offset = cursor.number("I"), cursor.number("Q")
    if kind not in GGUF_ENCODINGS:
        what = f"type {GGUF_UNREADABLE[kind]}" if kind in GGUF_UNREADABLE else f"the unknown type {kind}"
        known = ", ".join(encoding.name for encoding in GGUF_ENCODINGS.values())
        raise CheckpointError(f"{file}: tensor {name!r} has {what}, which cannot be decoded; known are {known}")
    encoding = GGUF_ENCODINGS[kind]
    if encoding.is_quantised and (not shape or shape[-1] % encoding.block):
        raise CheckpointError(
            f"{file}: tensor {name!r} of shape {list(shape)}: its rows are no whole {encoding.name} blocks of "
            f"{encoding.block}: {AGAIN}"
        )
    return TensorEntry(
        name=canonical_name(name),
        stored_name=name,
        file=file,
        offset=offset,
        num_bytes=encoding.num_bytes(prod(shape)),
        shape=shape,
        encoding=encoding,
    )


def _data_start(file: Path, cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{file}: general.alignment = {alignment!r} must be a number above 0")
    return -(-cursor.position // alignment) * alignment


def _placed(file: Path, entries: list[TensorEntry], data_start: int, file_bytes: int) -> dict[str, TensorEntry]:
    placed: dict[str, TensorEntry] = {}
    for entry in entries:
        if entry.stored_name in placed:
            raise CheckpointError(f"{entry} is in the header twice: {AGAIN}")
        placed[entry.stored_name] = replace(entry, offset=data_start + entry.offset)
    check_bytes(file, placed.values(), file_bytes)
    return placed
