"""From a manifest and an index to the exact bytes to read, and the check that the two fit. Pure: no torch, no file.

Promises: the reads of a manifest fill each row of each parameter once, touch no byte outside its shard (a quantised
column range is rounded out to whole blocks), and come in the order of the files. Refuses to know how bytes become
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mpiinfer.errors import CheckpointError
from mpiinfer.model.config import ModelConfig
from mpiinfer.model.families import COMPUTED_SUFFIXES, HEAD
from mpiinfer.model.manifest import Parameter, Piece, stage_manifest
from mpiinfer.weights.index import CheckpointIndex, TensorEntry

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Read:
    """A rectangle of one stored tensor, and the rows of one parameter that it becomes.

    row: first row of the parameter. num_rows: rows of the rectangle; a vector is one row of `num_columns`.
    offset: first byte of the first row's part in the file. row_bytes: of one row's part. stride: from a row's part to
    the next. skip: elements to drop from the start of each decoded part, which then has `num_columns` to keep.
    """

    entry: TensorEntry
    parameter: str
    row: int
    num_rows: int
    num_columns: int
    offset: int
    row_bytes: int
    stride: int
    skip: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def is_vector(self) -> bool:
        return len(self.entry.shape) == 1

    @property
    def filled(self) -> range:
        """The rows of the parameter that are filled."""
        return range(self.row, self.row + (self.num_columns if self.is_vector else self.num_rows))

    @property
    def unit(self) -> int:
        """The rows that must stay together: the pairs of a head lie half a head apart once they are in order."""
        return 1 if self.is_vector else max(self.entry.paired_head_dim, 1)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, number) of the bytes to read, in the order of rows; rows that touch are one range."""
        if self.row_bytes == self.stride or self.num_rows == 1:
            yield self.offset, self.num_bytes
        else:
            for row in range(self.num_rows):
                yield self.offset + row * self.stride, self.row_bytes

    def split(self, num_rows: int) -> Iterator[Read]:
        """The same rectangle in parts of at most `num_rows` rows, but never less than a `unit`."""
        step = max(num_rows // self.unit, 1) * self.unit
        for start in range(0, self.num_rows, step):
            yield replace(
                self,
                row=self.row + start,
                num_rows=min(step, self.num_rows - start),
                offset=self.offset + start * self.stride,
            )


def plan_reads(manifest: Sequence[Parameter], index: CheckpointIndex) -> tuple[Read, ...]:
    """All reads that fill the parameters of `manifest`, sorted by file and offset.

    `check_names` has been called: every tensor is there, of its shape.
    """
    reads = [read for parameter in manifest for read in _parameter_reads(parameter, index)]
    return tuple(sorted(reads, key=lambda read: (str(read.entry.file), read.offset)))


def shard_bytes(manifest: Sequence[Parameter], index: CheckpointIndex) -> int:
    """Bytes that the shard's elements take in the file; a part of a block counts for its share."""
    pieces = (piece for parameter in manifest for piece in parameter.pieces)
    return sum(index.entries[piece.tensor].encoding.num_bytes(piece.num_elements) for piece in pieces)


def check_names(config: ModelConfig, index: CheckpointIndex, spell: Callable[[str], str] = str) -> None:
    """Raise CheckpointError unless the checkpoint holds the tensors of the model and no others, each of its shape.

    A tied head that is stored as well is accepted and not read; so are tensors that every reader computes itself.
    spell: how the checkpoint spells a canonical name.
    """
    manifest = stage_manifest(config, range(config.num_layers), 0, 1)
    claims = {piece.tensor: piece for parameter in manifest for piece in parameter.pieces}
    missing = [name for name in claims if name not in index.entries]
    if missing:
        hint = " (tie_word_embeddings is false in its config)" if missing == [HEAD] else ""
        raise CheckpointError(
            f"{index.where}: tensor {_names(map(spell, missing))} missing{hint}: the checkpoint is incomplete, or its "
            "config is of another model"
        )
    _check_unclaimed(config, index, claims.keys())
    for name, piece in claims.items():
        entry = index.entries[name]
        if entry.shape != piece.shape:
            raise CheckpointError(
                f"{entry} has shape {list(entry.shape)}, but by its config the model needs {list(piece.shape)}"
            )


def _check_unclaimed(config: ModelConfig, index: CheckpointIndex, claimed: Iterable[str]) -> None:
    known = {*claimed, *([HEAD] if config.tied_embeddings else [])}
    unclaimed = [
        entry for name, entry in index.entries.items() if name not in known and not name.endswith(COMPUTED_SUFFIXES)
    ]
    if unclaimed:
        raise CheckpointError(
            f"{unclaimed[0].file}: tensor {_names(entry.stored_name for entry in unclaimed)} not part of a "
            f"{config.family} model of {config.num_layers} layers: the config is of another model, or the model of a "
            "kind that is not supported"
        )


def _names(names: Iterable[str]) -> str:
    """'a' is; 'a', 'b' are; 'a', 'b', 'c' and 5 more are."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(repr, listed[:_SHOWN])) + more + (" is" if len(listed) == 1 else " are")


def _parameter_reads(parameter: Parameter, index: CheckpointIndex) -> Iterator[Read]:
    row = 0
    for piece in parameter.pieces:
        yield _piece_read(parameter.name, row, piece, index.entries[piece.tensor])
        row += piece.local_shape[0]


def _piece_read(parameter: str, row: int, piece: Piece, entry: TensorEntry) -> Read:
    assert entry.shape == piece.shape, f"{entry}: check_names comes first"
    rows, columns = (range(1), piece.ranges[0]) if len(piece.shape) == 1 else piece.ranges
    head = entry.paired_head_dim
    if head:
        heads = columns if len(piece.shape) == 1 else rows
        assert heads.start % head == 0 == len(heads) % head, "query and key rows are cut between heads only"
    block, block_bytes = entry.encoding.block, entry.encoding.block_bytes
    first, stop = columns.start // block, -(-columns.stop // block)
    stride = piece.shape[-1] // block * block_bytes
    return Read(
        entry=entry,
        parameter=parameter,
        row=row,
        num_rows=len(rows),
        num_columns=len(columns),
        offset=entry.offset + rows.start * stride + first * block_bytes,
        row_bytes=(stop - first) * block_bytes,
        stride=stride,
        skip=columns.start - first * block,
    )
