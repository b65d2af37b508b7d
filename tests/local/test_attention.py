"""Attention over blocks: against a dense computation in float64, by kernel and by torch, and free of its neighbours."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from mpiinfer.comm.solo import SoloDomain
from mpiinfer.model import attention as module
from mpiinfer.model.attention import Attention, HeadNorms
from mpiinfer.model.batch import Batch, Segment
from mpiinfer.model.cache import BlockCache
from mpiinfer.model.formats import DenseWeight
from mpiinfer.model.kernels import Library, usable_libraries
from mpiinfer.model.layers import ColumnLinear, RowLinear
from mpiinfer.model.rotary import Rotation
from mpiinfer.model.shard import HeadShard

LIBRARIES = [None, *usable_libraries()]
CPU = torch.device("cpu")
EPS = 1e-6


@pytest.fixture(params=LIBRARIES, ids=lambda path: path.stem if path else "torch")
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library | None:
    """Attention uses this library, or the torch form."""
    loaded = Library(request.param) if request.param else None
    monkeypatch.setattr(module, "library", lambda: loaded)
    return loaded


@dataclass(frozen=True)
class Shape:
    """Heads of a model of which a shard has its part."""

    num_heads: int
    num_kv_heads: int
    shard: int = 0
    num_shards: int = 1
    head_dim: int = 64
    window: int | None = None
    block_tokens: int = 16
    normed: bool = False

    @property
    def heads(self) -> HeadShard:
        return HeadShard.of(self.num_heads, self.num_kv_heads, self.shard, self.num_shards)

    @property
    def width(self) -> int:
        return (len(self.heads.queries) + 2 * len(self.heads.kv)) * self.head_dim


SHAPES = [
    Shape(9, 3),
    Shape(9, 3, shard=1, num_shards=2),  # part of a group, then a whole one
    Shape(9, 3, shard=1, num_shards=4),
    Shape(4, 4, head_dim=24),
    Shape(14, 2, head_dim=80, window=33),
    Shape(8, 1, head_dim=128, normed=True),
    Shape(5, 5, head_dim=32, window=1),
    Shape(64, 1, head_dim=16),  # more heads to one key than are taken at once
    Shape(6, 2, block_tokens=32, window=100),
    Shape(6, 2, block_tokens=7),  # not for the kernels
    Shape(6, 2, block_tokens=1, head_dim=10),
]


class Layer:
    """One attention layer whose projections pass everything through."""

    def __init__(self, shape: Shape, num_blocks: int = 64) -> None:
        self.shape = shape
        q_norm, k_norm = (1 + 0.3 * _values(shape.head_dim, seed=seed) for seed in (1, 2))
        self.norms = HeadNorms(q_norm, k_norm, EPS) if shape.normed else None
        mixed = len(shape.heads.queries) * shape.head_dim
        self.attention = Attention(
            ColumnLinear(_identity(shape.width), None),
            RowLinear(_identity(mixed), None, SoloDomain()),
            self.norms,
            shape.heads,
            shape.head_dim,
            0,
            shape.window,
            CPU,
        )
        self.cache = BlockCache(
            1, len(shape.heads.kv), shape.head_dim, num_blocks, shape.block_tokens, torch.float32, CPU
        )
        for stale in (self.cache.keys, self.cache.values):
            stale.fill_(float("nan"))  # what nobody has written must not matter
        self.frequencies = 10000 ** -(torch.arange(shape.head_dim // 2) / (shape.head_dim // 2))

    def __call__(self, segments: list[Segment], x_TW: torch.Tensor) -> torch.Tensor:
        batch = Batch.of([0] * x_TW.shape[0], segments, [], self.shape.block_tokens, CPU)
        rotation = Rotation(self.frequencies, batch.positions, torch.float32)
        return self.attention(x_TW.clone(), batch, rotation, self.cache).clone()

    def expected(self, x_LW: torch.Tensor) -> torch.Tensor:
        """A whole sequence, densely, in float64."""
        shape, heads = self.shape, self.shape.heads
        num_q, num_kv, length = len(heads.queries), len(heads.kv), x_LW.shape[0]
        parts = x_LW.double().view(length, num_q + 2 * num_kv, shape.head_dim)
        q, k, v = parts[:, :num_q], parts[:, num_q : num_q + num_kv], parts[:, num_q + num_kv :]
        if self.norms is not None:
            q, k = (
                y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
                for y, weight in ((q, self.norms.q_weight), (k, self.norms.k_weight))
            )
        rotation = Rotation(self.frequencies.double(), torch.arange(length), torch.float64)
        q, k = rotation(q), rotation(k)
        of_query = list(heads.kv_of_query)
        scores = torch.einsum("iqd,jqd->qij", q, k[:, of_query]) / shape.head_dim**0.5
        i, j = torch.arange(length).unsqueeze(1), torch.arange(length).unsqueeze(0)
        seen = (j <= i) & (j > i - (shape.window or length))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("qij,jqd->iqd", weights, v[:, of_query]).flatten(1).float()


def _identity(width: int) -> DenseWeight:
    weight = DenseWeight((width, width), torch.float32, CPU)
    weight.fill(0, torch.eye(width))
    return weight


def _values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tables(shape: Shape, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Blocks for each sequence, in no order."""
    counts = [-(-length // shape.block_tokens) for length in lengths]
    blocks = list(range(sum(counts)))
    random.Random(seed).shuffle(blocks)
    return [[blocks.pop() for _ in range(count)] for count in counts]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequences_in_parts_equal_the_dense_form(library: Library | None, shape: Shape) -> None:
    """Sequences of several lengths, each in parts of other sizes, beside each other in the same steps."""
    parts = [[40, 1, 1, 30], [1, 1, 1, 1], [100, 64, 1, 65], [16, 16, 17, 15]]
    lengths = [sum(part) for part in parts]
    tables = _tables(shape, lengths)
    layer = Layer(shape, num_blocks=sum(map(len, tables)))
    inputs = [_values(length, shape.width, seed=seed) for seed, length in enumerate(lengths)]
    outputs: list[list[torch.Tensor]] = [[] for _ in parts]
    starts = [0] * len(parts)
    for step in range(4):
        segments, rows = [], []
        for number, part in enumerate(parts):
            first = sum(len(row) for row in rows)
            segments.append(Segment(tables[number], first, starts[number], part[step]))
            rows.append(inputs[number][starts[number] : starts[number] + part[step]])
            starts[number] += part[step]
        mixed = layer(segments, torch.cat(rows))
        for number, segment in enumerate(segments):
            outputs[number].append(mixed[segment.first : segment.first + segment.num_tokens])
    for number, of_sequence in enumerate(outputs):
        torch.testing.assert_close(torch.cat(of_sequence), layer.expected(inputs[number]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.block_tokens % 16 == 0], ids=str)
def test_by_kernel_a_token_sees_neither_neighbours_nor_cuts(shape: Shape) -> None:
    """Bit for bit: alone or beside others, in one part or token by token, with any number of threads."""
    if not usable_libraries():
        pytest.skip("no kernels were compiled here")
    length = 150
    inputs = [_values(length, shape.width, seed=seed) for seed in range(3)]
    tables = _tables(shape, [length] * 3)

    def together() -> torch.Tensor:
        layer = Layer(shape)
        segments = [Segment(table, number * length, 0, length) for number, table in enumerate(tables)]
        return layer(segments, torch.cat(inputs))[:length]

    whole = together()
    layer, cut = Layer(shape), []
    for start, stop in [(0, 70), *((at, at + 1) for at in range(70, 140)), (140, 150)]:
        cut.append(layer([Segment(tables[0], 0, start, stop - start)], inputs[0][start:stop]))
    assert torch.equal(torch.cat(cut), whole)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(together(), whole)
    finally:
        torch.set_num_threads(threads)
