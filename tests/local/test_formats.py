"""Formats of linear weights: what they hold, what they multiply to, and that no row of a product sees another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from mpiinfer.errors import UsageError
from mpiinfer.model import kernels, panels, quantised
from mpiinfer.model.formats import LinearWeight
from mpiinfer.model.kernels import Library, usable_libraries
from mpiinfer.model.panels import DTYPES, PanelWeight
from mpiinfer.model.quantised import BLOCK, QuantisedWeight
from mpiinfer.weights.choose import CHOICES, compute_dtype
from mpiinfer.weights.decode import decode_blocks
from mpiinfer.weights.encodings import GGUF_ENCODINGS
from mpiinfer.weights.index import TensorEntry
from mpiinfer.weights.slices import Read

LIBRARIES = [None, *usable_libraries()]
# Whole panels and blocks, and neither; a single row and column.
SHAPES = [(64, 64), (70, 96), (33, 50), (5, 3), (1, 1), (130, 576)]
FORMATS = ["fp32", "fp16", "bf16", "int8", "int8 with minimum", "int4", "int4 with minimum"]


@pytest.fixture(params=LIBRARIES, ids=lambda path: path.stem if path else "torch")
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library | None:
    """Weights that are made from now on use this library, or the torch form."""
    loaded = Library(request.param) if request.param else None
    for module in (kernels, panels, quantised):
        monkeypatch.setattr(module, "library", lambda: loaded)
    return loaded


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _new(name: str, shape: tuple[int, int], lead: int = 0) -> LinearWeight:
    if name in DTYPES:
        return PanelWeight(shape, name)  # type: ignore[arg-type]
    return QuantisedWeight(shape, 8 if "8" in name else 4, has_minimum="minimum" in name, lead=lead)


def _filled(name: str, shape: tuple[int, int], lead: int = 0) -> LinearWeight:
    weight = _new(name, shape, lead)
    values = _values(*shape)
    if name == "int4":  # holds no numbers but a file's
        values = (values * 2).round().clamp(-8, 7)
        for row, of_row in enumerate(values):
            weight.fill_blocks(row, _blocks_of(of_row, weight))  # type: ignore[attr-defined]
    else:
        weight.fill(0, values)
    return weight


def _blocks_of(values: torch.Tensor, weight: LinearWeight) -> quantised.Blocks:
    """One row of whole numbers from -8 to 7 as blocks of scale 1."""
    assert isinstance(weight, QuantisedWeight)
    num_blocks = -(-(weight.lead + values.shape[0]) // BLOCK)
    q = torch.full((num_blocks * BLOCK,), 8, dtype=torch.uint8)
    q[weight.lead : weight.lead + values.shape[0]] = (values + 8).to(torch.uint8)
    d = torch.ones((1, num_blocks), dtype=torch.float16)
    return quantised.Blocks(q.view(1, num_blocks, BLOCK), d, None, 8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_values_held(library: Library | None, name: str, shape: tuple[int, int]) -> None:
    weight = _filled(name, shape)
    x = _values(13, shape[1], seed=1)
    if name in DTYPES:
        assert torch.equal(weight.tensor(), _values(*shape).to(DTYPES[name]).float())
        expected = x.double() @ weight.tensor().double().t()
    else:
        expected = _rounded(x).double() @ weight.tensor().double().t()
    torch.testing.assert_close(weight(x), expected.float(), rtol=1e-5, atol=1e-4)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as they are rounded: to 8 bits in blocks of 32."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).view(x.shape[0], -1, BLOCK)
    largest = padded.abs().amax(dim=2, keepdim=True)
    rounded = (padded * torch.where(largest > 0, 127 / largest, 0.0)).round() * (largest / 127)
    return rounded.flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_see_its_neighbours(name: str) -> None:
    """Bit for bit, for any number of rows and of threads."""
    weight = _filled(name, (130, 576))
    x = _values(520, 576, seed=2)
    alone = torch.cat([weight(x[row : row + 1]) for row in range(70)])
    for count in (2, 3, 5, 6, 7, 13, 14, 15, 29, 64, 70):
        assert torch.equal(weight(x[:count]), alone[:count])
    whole = weight(x)
    assert torch.equal(whole[:70], alone)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(weight(x), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_looked_up(name: str) -> None:
    weight = _filled(name, (70, 96))
    ids = torch.tensor([69, 0, 31, 32, 33, 0])
    assert torch.equal(weight.rows(ids), weight.tensor()[ids])


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "int4"])
def test_filled_by_pieces_is_filled_at_once(name: str) -> None:
    values = _values(70, 96)
    pieces = _new(name, (70, 96))
    for first, stop in ((64, 70), (0, 1), (1, 40), (40, 64)):
        pieces.fill(first, values[first:stop])
    assert torch.equal(pieces.tensor(), _filled(name, (70, 96)).tensor())


def test_rounding_is_to_the_nearest() -> None:
    values = _values(64, 96)
    largest = values.abs().view(64, -1, BLOCK).amax(dim=2).repeat_interleave(BLOCK, dim=1)
    eight, four = _filled("int8", (64, 96)), _filled("int4 with minimum", (64, 96))
    assert bool(((eight.tensor() - values).abs() <= largest / 127 * 0.51).all())
    spread = values.view(64, -1, BLOCK).amax(dim=2) - values.view(64, -1, BLOCK).amin(dim=2)
    assert bool(((four.tensor() - values).abs() <= spread.repeat_interleave(BLOCK, dim=1) / 15 * 0.52).all())


@pytest.mark.parametrize("lead", [0, 7, 31])
@pytest.mark.parametrize("name", ["int8", "int8 with minimum", "int4", "int4 with minimum"])
def test_a_shard_may_begin_inside_a_block(library: Library | None, name: str, lead: int) -> None:
    weight = _filled(name, (33, 50), lead)
    x = _values(3, 50, seed=1)
    padded = _rounded(torch.nn.functional.pad(x, (lead, 0)))[:, lead:]
    expected = padded.double() @ weight.tensor().double().t()
    torch.testing.assert_close(weight(x), expected.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [range(96), range(32, 96), range(40, 90)], ids=str)
@pytest.mark.parametrize("number", [2, 3, 8])
def test_blocks_of_a_file_are_held_as_they_are(number: int, columns: range, bits: quantised.Bits) -> None:
    """Q4_0, Q4_1 and Q8_0, decoded by the gguf package; a column range is one of a shard."""
    encoding = GGUF_ENCODINGS[number]
    if encoding.name == "Q8_0" and bits == 4:
        pytest.skip("8 bits do not fit into 4: such a weight is rounded")
    values = _values(40, 96).numpy()
    kind = GGMLQuantizationType[encoding.name]
    raw = quants.quantize(values, kind)
    decoded = torch.from_numpy(np.array(quants.dequantize(raw, kind)))
    first, stop = columns.start // BLOCK, -(-columns.stop // BLOCK)
    part = np.ascontiguousarray(raw.reshape(40, 3, -1)[:, first:stop]).reshape(-1)
    weight = QuantisedWeight(
        (40, len(columns)), bits, has_minimum=encoding.name == "Q4_1", lead=columns.start - first * BLOCK
    )
    weight.fill_blocks(0, decode_blocks(_read(encoding.name, number, columns, part.nbytes // 40), part))
    torch.testing.assert_close(weight.tensor(), decoded[:, columns.start : columns.stop], rtol=1e-6, atol=1e-7)


def _read(name: str, number: int, columns: range, row_bytes: int) -> Read:
    from pathlib import Path

    entry = TensorEntry(
        name=name,
        stored_name=name,
        file=Path("made-up"),
        offset=0,
        num_bytes=0,
        shape=(40, 96),
        encoding=GGUF_ENCODINGS[number],
    )
    return Read(
        entry=entry,
        parameter=name,
        row=0,
        num_rows=40,
        num_columns=len(columns),
        offset=0,
        row_bytes=row_bytes,
        stride=row_bytes,
        skip=columns.start % BLOCK,
    )


def test_bytes_are_counted() -> None:
    assert PanelWeight((70, 96), "fp16").num_bytes == 96 * 96 * 2  # three panels of 32 rows
    assert QuantisedWeight((64, 96), 8, has_minimum=False).num_bytes == 64 * 96 // 32 * 34
    assert QuantisedWeight((64, 96), 4, has_minimum=True).num_bytes == 64 * 96 // 32 * 20


def test_what_a_device_cannot_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="--weights int3: unknown format; known are exact, fp32"):
        compute_dtype("int3", "float32", torch.device("cpu"))
    for choice in ("int8", "int4"):
        with pytest.raises(UsageError, match="runs on CPUs only"):
            compute_dtype(choice, "float32", torch.device("cuda"))
    assert all(compute_dtype(choice, "bfloat16", torch.device("cpu")) == torch.float32 for choice in CHOICES)
    assert compute_dtype("exact", "bfloat16", torch.device("cuda")) == torch.bfloat16
