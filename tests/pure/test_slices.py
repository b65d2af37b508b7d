"""Byte ranges: what a rank reads is its shard, all of it, nothing else, in order; and the names of both sides agree.

A file is simulated: byte b of it stands for the elements of block b, so that decoding is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiinfer.errors import CheckpointError
from mpiinfer.model.config import ModelConfig
from mpiinfer.model.families import EMBEDDING, HEAD
from mpiinfer.model.manifest import Parameter, stage_manifest
from mpiinfer.weights.encodings import Encoding
from mpiinfer.weights.gguf import gguf_name
from mpiinfer.weights.index import CheckpointIndex, TensorEntry
from mpiinfer.weights.slices import Read, check_names, plan_reads, shard_bytes
from tests.checkpoint_files import tensors_of, tiny_config

FOLDER = Path("folder")


def index_of(config: ModelConfig, block: int = 1, num_files: int = 1, paired: bool = False) -> CheckpointIndex:
    """An index in which each block is one byte, with a gap between tensors."""
    entries: dict[str, TensorEntry] = {}
    ends = [16] * num_files
    for count, (name, shape) in enumerate(tensors_of(config).items()):
        file = count % num_files
        encoding = Encoding("test", block, 1) if len(shape) == 2 else Encoding("test", 1, 1)
        entry = TensorEntry(
            name=name,
            stored_name=name,
            file=FOLDER / f"{file}.safetensors",
            offset=ends[file],
            num_bytes=encoding.num_bytes(prod(shape)),
            shape=shape,
            encoding=encoding,
            paired_head_dim=config.head_dim if paired and (".q_proj" in name or ".k_proj" in name) else 0,
        )
        entries[name] = entry
        ends[file] = entry.stop + 3
    return CheckpointIndex(FOLDER, entries)


def stored_elements(read: Read) -> Iterator[list[int]]:
    """For each row of a read, the elements of the stored tensor that are kept, decoded from the bytes read."""
    block = read.entry.encoding.block
    raw = [byte for offset, size in read.ranges() for byte in range(offset, offset + size)]
    assert len(raw) == read.num_bytes
    for row in range(read.num_rows):
        part = raw[row * read.row_bytes : (row + 1) * read.row_bytes]
        elements = [(byte - read.entry.offset) * block + i for byte in part for i in range(block)]
        yield elements[read.skip : read.skip + read.num_columns]


def expected_rows(parameter: Parameter) -> list[tuple[str, list[int]]]:
    """For each row of a parameter, the tensor and the elements of it that belong there (rows unpaired)."""
    rows = []
    for piece in parameter.pieces:
        if len(piece.shape) == 1:
            rows += [(piece.tensor, [i]) for i in piece.ranges[0]]
        else:
            columns = piece.ranges[1]
            rows += [(piece.tensor, [i * piece.shape[1] + j for j in columns]) for i in piece.ranges[0]]
    return rows


def filled_rows(reads: tuple[Read, ...], parameter: str, part_rows: int) -> dict[int, tuple[str, list[int]]]:
    rows: dict[int, tuple[str, list[int]]] = {}
    for whole in (read for read in reads if read.parameter == parameter):
        for read in whole.split(part_rows):
            values = list(stored_elements(read))
            if read.is_vector:
                values = [[element] for element in values[0]]
            assert len(values) == len(read.filled)
            for row, elements in zip(read.filled, values, strict=True):
                assert row not in rows, "filled twice"
                rows[row] = (read.entry.name, elements)
    return rows


@st.composite
def shards(draw: st.DrawFn) -> tuple[ModelConfig, int, int, int]:
    """(config, block, number of shards, rows in a part); rows are whole blocks, as every quantiser demands."""
    block = draw(st.sampled_from([1, 1, 4, 8]))
    num_kv_heads = draw(st.integers(1, 4))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    while num_heads * head_dim % block:
        head_dim *= 2
    config = tiny_config(
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=draw(st.integers(1, 4)) * block,
        intermediate_size=draw(st.integers(1, 40)) * block,
        vocab_size=draw(st.integers(1, 40)),
        qkv_bias=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )
    limit = min(config.num_heads, config.intermediate_size, config.vocab_size, 4)
    return config, block, draw(st.integers(1, limit)), draw(st.integers(0, 9))


@given(shards())
@settings(max_examples=150, deadline=None)
def test_reads_fill_every_row_with_its_own_elements(drawn: tuple[ModelConfig, int, int, int]) -> None:
    config, block, num_shards, part_rows = drawn
    index = index_of(config, block, num_files=2)
    for shard in range(num_shards):
        manifest = stage_manifest(config, range(1), shard, num_shards)
        reads = plan_reads(manifest, index)
        for parameter in manifest:
            expected = dict(enumerate(expected_rows(parameter)))
            assert filled_rows(reads, parameter.name, part_rows) == expected


@given(shards())
@settings(max_examples=150, deadline=None)
def test_reads_are_sequential_and_no_larger_than_the_shard(drawn: tuple[ModelConfig, int, int, int]) -> None:
    config, block, num_shards, _ = drawn
    index = index_of(config, block, num_files=2)
    for shard in range(num_shards):
        manifest = stage_manifest(config, range(1), shard, num_shards)
        reads = plan_reads(manifest, index)
        at: dict[Path, int] = {}
        for read in reads:
            for offset, size in read.ranges():
                assert offset >= at.get(read.entry.file, 0), "never back, never a byte twice"
                assert read.entry.offset <= offset and offset + size <= read.entry.stop
                at[read.entry.file] = offset + size
        assert [read.entry.file for read in reads] == sorted(read.entry.file for read in reads)
        num_read = sum(read.num_bytes for read in reads)
        rounding = sum(2 * read.num_rows for read in reads if read.num_columns < read.entry.shape[-1])
        assert shard_bytes(manifest, index) <= num_read + len(reads)
        assert num_read <= shard_bytes(manifest, index) + (rounding if block > 1 else 0)


def test_rows_that_touch_are_one_range_and_column_parts_are_one_a_row() -> None:
    config = tiny_config()
    index = index_of(config)
    whole = {read.entry.name: read for read in plan_reads(stage_manifest(config, range(2), 0, 1), index)}
    assert all(len(list(read.ranges())) == 1 for read in whole.values())
    half = {read.entry.name: read for read in plan_reads(stage_manifest(config, range(2), 1, 2), index)}
    assert len(list(half[EMBEDDING].ranges())) == 1
    down = half["model.layers.0.mlp.down_proj.weight"]
    assert len(list(down.ranges())) == config.hidden_size and down.row_bytes == down.num_columns


@given(shards())
@settings(max_examples=60, deadline=None)
def test_paired_rows_stay_within_whole_heads(drawn: tuple[ModelConfig, int, int, int]) -> None:
    config, block, num_shards, part_rows = drawn
    index = index_of(config, block, paired=True)
    for shard in range(num_shards):
        for read in plan_reads(stage_manifest(config, range(1), shard, num_shards), index):
            if read.entry.paired_head_dim:
                parts = list(read.split(part_rows))
                assert sum(part.num_rows for part in parts) == read.num_rows
                for part in parts:
                    assert len(part.filled) % config.head_dim == 0 == (part.row - read.row) % config.head_dim


# Names


def refused(config: ModelConfig, index: CheckpointIndex, gguf: bool = False) -> str:
    with pytest.raises(CheckpointError) as error:
        check_names(config, index, gguf_name if gguf else str)
    text = str(error.value)
    assert "\n" not in text and str(FOLDER) in text
    return text


def without(index: CheckpointIndex, *names: str) -> CheckpointIndex:
    return CheckpointIndex(index.where, {name: e for name, e in index.entries.items() if name not in names})


def including(index: CheckpointIndex, name: str) -> CheckpointIndex:
    model = index.entries[EMBEDDING]
    return CheckpointIndex(index.where, {**index.entries, name: replace(model, name=name, stored_name=name)})


def test_a_whole_checkpoint_is_accepted() -> None:
    for tied in (False, True):
        config = tiny_config(tied_embeddings=tied, qkv_bias=True, mlp_bias=True, qk_norm=True)
        check_names(config, index_of(config))


def test_missing() -> None:
    config = tiny_config()
    text = refused(config, without(index_of(config), "model.norm.weight"))
    assert "tensor 'model.norm.weight' is missing" in text
    assert "'output_norm.weight' is missing" in refused(config, without(index_of(config), "model.norm.weight"), True)
    layer = [name for name in tensors_of(config) if ".layers.1." in name]
    text = refused(config, without(index_of(config), *layer))
    assert f"'{layer[0]}'" in text and f"and {len(layer) - 3} more are missing" in text


def test_missing_head_says_that_the_embedding_may_be_tied() -> None:
    assert "tie_word_embeddings is false" in refused(tiny_config(), without(index_of(tiny_config()), HEAD))


def test_unclaimed() -> None:
    config = tiny_config()
    text = refused(config, including(index_of(config), "model.layers.2.mlp.up_proj.weight"))
    assert "0.safetensors: tensor 'model.layers.2.mlp.up_proj.weight' is not part of a llama model of 2 layers" in text
    one_more_layer = index_of(tiny_config(num_layers=3))
    assert "and 6 more are not part" in refused(config, one_more_layer)


def test_a_bias_that_the_config_does_not_know_is_unclaimed() -> None:
    assert "q_proj.bias" in refused(tiny_config(), index_of(tiny_config(qkv_bias=True)))


def test_tied_head_that_is_stored_too_and_computed_tensors_are_no_fault() -> None:
    tied = tiny_config(tied_embeddings=True)
    check_names(tied, including(index_of(tied), HEAD))
    check_names(tied, including(index_of(tied), "model.layers.0.self_attn.rotary_emb.inv_freq"))


def test_wrong_shape() -> None:
    text = refused(tiny_config(), index_of(tiny_config(intermediate_size=36)))
    assert "tensor 'model.layers.0.mlp.gate_proj.weight' has shape [36, 20]" in text and "[37, 20]" in text
