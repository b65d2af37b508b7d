"""Fill a stage's weights from a checkpoint: each rank its own bytes, read once, in bounded memory.

Promises: every parameter of the manifest is filled exactly once. Host memory beyond the weights stays under 32 MB: one
read of CHUNK_BYTES, one decoded part of PART_ELEMENTS (at least a row; a head, where rows are paired) and the five or
so arrays of that size that decoding makes. Nothing is mapped, since mapped pages count as resident memory. Refuses to
know about ranks, progress bars and devices.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mpiinfer.errors import CheckpointError
from mpiinfer.model.formats import Weight
from mpiinfer.model.manifest import Parameter
from mpiinfer.model.quantised import QuantisedWeight
from mpiinfer.weights.checkpoint import Checkpoint
from mpiinfer.weights.decode import BLOCK_BITS, decode, decode_blocks
from mpiinfer.weights.slices import Read, plan_reads, shard_bytes

CHUNK_BYTES = 4 << 20
# A quantised part is decoded where it fits a core's second-level cache: twice as fast as in larger parts.
PART_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class LoadReport:
    """bytes_read: from files. shard_bytes_in_file: what the shard's elements take there. seconds: wall time."""

    bytes_read: int
    shard_bytes_in_file: int
    seconds: float


def load(
    checkpoint: Checkpoint,
    manifest: Sequence[Parameter],
    weights: Mapping[str, Weight],
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> LoadReport:
    """Read the bytes of `manifest` into `weights`, by parameter name. `checkpoint.check()` has been called.

    progress: told the number of bytes of each chunk, when it is in its place. Raises CheckpointError naming file and
    tensor, where a file cannot be read or has become shorter.
    """
    started = time.perf_counter()
    for parameter in manifest:
        assert weights[parameter.name].shape == parameter.shape, f"{parameter.name}: allocated in another shape"
    filled: dict[str, list[range]] = {parameter.name: [] for parameter in manifest}
    bytes_read = 0
    for chunk, raw in _chunks(plan_reads(manifest, checkpoint.index)):
        for part in chunk.split(_part_rows(chunk)):
            start = (part.row - chunk.row) * part.row_bytes
            _fill(weights[part.parameter], part, raw[start : start + part.num_bytes])
            filled[part.parameter].append(part.filled)
        bytes_read += chunk.num_bytes
        progress(chunk.num_bytes)
    for parameter in manifest:
        _assert_tiled(parameter, filled[parameter.name])
    return LoadReport(bytes_read, shard_bytes(manifest, checkpoint.index), time.perf_counter() - started)


Raw = np.ndarray[Any, np.dtype[np.uint8]]


def _fill(weight: Weight, part: Read, raw: Raw) -> None:
    """Put the part into its place: as blocks where the weight can hold them as they are."""
    bits = BLOCK_BITS.get(part.entry.encoding.name)
    if bits is not None and isinstance(weight, QuantisedWeight) and weight.bits >= bits:
        weight.fill_blocks(part.row, decode_blocks(part, raw))
    else:
        weight.fill(part.row, decode(part, raw))


def _chunks(reads: Sequence[Read]) -> Iterator[tuple[Read, Raw]]:
    """Each chunk with its bytes, which stay as they are until the next one is asked for."""
    buffer_bytes = max([CHUNK_BYTES, *(min(read.unit, read.num_rows) * read.row_bytes for read in reads)])
    buffer = np.empty(buffer_bytes, dtype=np.uint8)
    for file, of_file in groupby(reads, key=lambda read: read.entry.file):
        with _opened(file) as descriptor:
            for read in of_file:
                for chunk in read.split(CHUNK_BYTES // read.row_bytes):
                    raw = buffer[: chunk.num_bytes]
                    _read_into(descriptor, chunk, raw)
                    yield chunk, raw


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_into(descriptor: int, read: Read, raw: Raw) -> None:
    view = raw.data
    at = 0
    for offset, num_bytes in read.ranges():
        stop = at + num_bytes
        while at < stop:
            try:
                got = os.preadv(descriptor, [view[at:stop]], offset)
            except OSError as error:
                raise CheckpointError(f"{read.entry} cannot be read: {error.strerror}") from None
            if got == 0:
                raise CheckpointError(f"{read.entry}: the file now ends at byte {offset}: it changed while it was read")
            at += got
            offset += got


def _part_rows(chunk: Read) -> int:
    if not chunk.entry.encoding.is_quantised:
        return chunk.num_rows
    return PART_ELEMENTS // chunk.num_columns


def _assert_tiled(parameter: Parameter, filled: list[range]) -> None:
    at = 0
    for rows in sorted(filled, key=lambda rows: rows.start):
        assert rows.start == at, f"{parameter.name}: row {at} is filled twice or not at all"
        at = rows.stop
    assert at == parameter.shape[0], f"{parameter.name}: rows from {at} on are not filled"
