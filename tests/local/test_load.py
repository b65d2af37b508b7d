"""Loaded weights are slices of the full tensors, in every format, layout and encoding, in bounded bytes and memory.

The dense references are torch's own state dicts and the gguf package's dequantisation of whole tensors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mpiinfer.errors import CheckpointError, ModelError
from mpiinfer.model.formats import DenseWeight, Weight
from mpiinfer.model.manifest import Parameter, stage_manifest
from mpiinfer.weights import load as loading
from mpiinfer.weights.checkpoint import Checkpoint, open_checkpoint
from mpiinfer.weights.encodings import GGUF_ENCODINGS
from mpiinfer.weights.load import LoadReport, load
from mpiinfer.weights.source import resolve_model
from tests.checkpoint_files import tensors_of

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SPLITS = {1: [range(5)], 2: [range(2), range(2, 5)], 3: [range(1), range(1, 4), range(4, 5)]}
Tensors = dict[str, torch.Tensor]


def allocate(manifest: tuple[Parameter, ...], dtype: torch.dtype = torch.float32) -> dict[str, Weight]:
    return {parameter.name: DenseWeight(parameter.shape, dtype, CPU) for parameter in manifest}


def expected(parameter: Parameter, full: Tensors, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    pieces = []
    for piece in parameter.pieces:
        tensor = full[piece.tensor]
        for dim, part in enumerate(piece.ranges):
            tensor = tensor.narrow(dim, part.start, len(part))
        pieces.append(tensor)
    return torch.cat(pieces).to(dtype)


def check_shard(
    checkpoint: Checkpoint,
    full: Tensors,
    manifest: tuple[Parameter, ...],
    dtype: torch.dtype = torch.float32,
) -> LoadReport:
    """Load one shard and compare each of its parameters; the report's bytes are those that progress was told."""
    weights, told = allocate(manifest, dtype), []
    report = load(checkpoint, manifest, weights, told.append)
    for parameter in manifest:
        torch.testing.assert_close(
            weights[parameter.name].tensor(),
            expected(parameter, full, dtype),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda text, name=parameter.name: f"{name}: {text}",
        )
    assert sum(told) == report.bytes_read
    return report


# Hugging Face folders


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest) -> Any:
    """A random llama of five heads, five layers, and sizes that nothing divides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 40, "intermediate_size": 111, "vocab_size": 103, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "attention_bias": True, "mlp_bias": True}
    network = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=request.param))
    with torch.no_grad():
        for parameter in network.parameters():  # biases and norms are constant else
            parameter.normal_()
    return network


def save_single(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    assert (folder / "model.safetensors").exists()


def save_sharded(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3


def save_without_index(model: Any, folder: Path) -> None:
    save_sharded(model, folder)
    (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize("save", [save_single, save_sharded, save_without_index])
def test_every_rank_of_every_layout_holds_its_slices(
    model: Any, save: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    save(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.check()
    full = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert set(tensors_of(checkpoint.config)) <= set(full)
    for num_shards in range(1, 5):
        for stages in SPLITS.values():
            for layers in stages:
                for shard in range(num_shards):
                    manifest = stage_manifest(checkpoint.config, layers, shard, num_shards)
                    report = check_shard(checkpoint, full, manifest)
                    planned = sum(parameter.num_elements * 4 for parameter in manifest)
                    allocated = sum(weight.num_bytes for weight in allocate(manifest).values())
                    assert planned == allocated == report.bytes_read == report.shard_bytes_in_file


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(model: Any, stored: torch.dtype, held: torch.dtype, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    full = {name: tensor.to(stored) for name, tensor in load_file(file).items()}
    save_file(full, file)
    checkpoint = open_checkpoint(tmp_path)
    manifest = stage_manifest(checkpoint.config, range(5), 1, 3)
    report = check_shard(checkpoint, full, manifest, held)
    assert report.bytes_read == sum(parameter.num_elements for parameter in manifest) * stored.itemsize
    assert sum(w.num_bytes for w in allocate(manifest, held).values()) == sum(p.num_elements for p in manifest) * (
        held.itemsize
    )


def test_small_chunks_give_the_same(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_single(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    monkeypatch.setattr(loading, "CHUNK_BYTES", 500)
    check_shard(checkpoint, dict(model.state_dict()), stage_manifest(checkpoint.config, range(5), 0, 2))


def test_a_file_that_became_shorter_names_file_and_tensor(model: Any, tmp_path: Path) -> None:
    save_single(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    last = max(checkpoint.index.entries.values(), key=lambda entry: entry.offset)
    with last.file.open("r+b") as stream:
        stream.truncate(last.stop - 1)
    manifest = stage_manifest(checkpoint.config, range(5), 0, 1)
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, manifest, allocate(manifest))
    text = str(error.value)
    assert str(last.file) in text and repr(last.stored_name) in text and "\n" not in text
    last.file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load(checkpoint, manifest, allocate(manifest))


def test_a_row_that_is_not_filled_is_noticed(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_single(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    manifest = stage_manifest(checkpoint.config, range(5), 0, 1)
    real = loading.plan_reads
    monkeypatch.setattr(loading, "plan_reads", lambda *args: real(*args)[1:])
    with pytest.raises(AssertionError, match=r"not filled|not at all"):
        load(checkpoint, manifest, allocate(manifest))
    monkeypatch.setattr(loading, "plan_reads", lambda *args: real(*args) + real(*args)[:1])
    with pytest.raises(AssertionError, match="twice"):
        load(checkpoint, manifest, allocate(manifest))


# GGUF: every encoding

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE, WORDS = 4, 2, 64, 256, 512, 70
GGUF_SHAPES = {
    "token_embd.weight": (WORDS, HIDDEN),
    "output.weight": (WORDS, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_q.bias": (HEADS * HEAD_DIM,),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.bias": (KV_HEADS * HEAD_DIM,),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.bias": (KV_HEADS * HEAD_DIM,),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (WIDE, HIDDEN),
    "blk.0.ffn_up.weight": (WIDE, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, WIDE),
}


def packed(values: np.ndarray[Any, Any], encoding: str) -> np.ndarray[Any, Any]:
    """`values` in an encoding; random blocks where the gguf package can only decode it."""
    import gguf

    if encoding == "F64":
        return values.astype(np.float64)
    kind = gguf.GGMLQuantizationType[encoding]
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        shape = gguf.quant_shape_to_byte_shape(values.shape, kind)
        return np.random.default_rng(0).integers(0, 120, shape, dtype=np.uint8)


def unpacked(raw: np.ndarray[Any, Any], encoding: str) -> np.ndarray[Any, Any]:
    import gguf

    if encoding == "F64":
        return raw.astype(np.float32)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[encoding])


def in_model_order(rows: torch.Tensor) -> torch.Tensor:
    """Rows of heads as llama's GGUF files store them, 2i next to 2i + 1, put at i and i + HEAD_DIM / 2."""
    ordered = torch.empty_like(rows)
    for head in range(0, rows.shape[0], HEAD_DIM):
        for i in range(HEAD_DIM // 2):
            ordered[head + i] = rows[head + 2 * i]
            ordered[head + i + HEAD_DIM // 2] = rows[head + 2 * i + 1]
    return ordered


def write_gguf(file: Path, architecture: str, encoding: str) -> Tensors:
    """A model of one layer, its matrices in `encoding`; gives the full tensors by canonical name."""
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    from mpiinfer.weights.gguf import canonical_name

    random = np.random.default_rng(1)
    full: Tensors = {}
    for name, shape in GGUF_SHAPES.items():
        values = random.standard_normal(shape, dtype=np.float32)
        own = encoding if len(shape) == 2 or GGUF_BLOCK[encoding] == 1 else "F32"
        raw = packed(values, own)
        kind = None if own == "F64" else gguf.GGMLQuantizationType[own]
        writer.add_tensor(name, raw, raw_dtype=kind)
        full[canonical_name(name)] = torch.from_numpy(unpacked(raw, own).copy()).reshape(shape)
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            full[canonical_name(name)] = in_model_order(full[canonical_name(name)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return full


GGUF_BLOCK = {encoding.name: encoding.block for encoding in GGUF_ENCODINGS.values()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("encoding", GGUF_BLOCK)
def test_every_gguf_type(encoding: str, tmp_path: Path) -> None:
    full = write_gguf(tmp_path / "m.gguf", "llama", encoding)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    checkpoint.check()
    assert checkpoint.config.qkv_bias and not checkpoint.config.tied_embeddings
    assert {entry.encoding.name for entry in checkpoint.index.entries.values()} <= {encoding, "F32"}
    for num_shards in (1, 3):
        for shard in range(num_shards):
            manifest = stage_manifest(checkpoint.config, range(1), shard, num_shards)
            report = check_shard(checkpoint, full, manifest)
            # Column cuts are rounded out by less than a block at either side of each of 2 * HIDDEN rows.
            block_bytes = max(e.encoding.block_bytes for e in checkpoint.index.entries.values())
            rounding = 2 * HIDDEN * 2 * block_bytes if GGUF_BLOCK[encoding] > 1 and num_shards > 1 else 0
            assert report.bytes_read <= 1.02 * report.shard_bytes_in_file + rounding


def test_rows_of_other_families_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = write_gguf(tmp_path / "m.gguf", "qwen2", "Q8_0")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    checkpoint.check()
    monkeypatch.setattr(loading, "PART_ELEMENTS", 1000)
    check_shard(checkpoint, full, stage_manifest(checkpoint.config, range(1), 1, 2))


def test_paired_rows_in_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = write_gguf(tmp_path / "m.gguf", "llama", "Q8_0")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    monkeypatch.setattr(loading, "PART_ELEMENTS", 1)
    monkeypatch.setattr(loading, "CHUNK_BYTES", 1)
    check_shard(checkpoint, full, stage_manifest(checkpoint.config, range(1), 0, 2))


# The real model


@pytest.fixture(scope="module")
def real_gguf() -> Path:
    try:
        return resolve_model("smollm2-135m-instruct")
    except ModelError as error:
        pytest.skip(str(error))


def test_real_model_equals_transformers_reading_of_the_file(real_gguf: Path) -> None:
    """All weights, above all the order of query and key rows."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = open_checkpoint(real_gguf)
    checkpoint.check()
    layers = checkpoint.config.num_layers
    with torch.device("meta"):
        names_only = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))
    full = load_gguf_checkpoint(str(real_gguf), return_tensors=True, model_to_load=names_only)["tensors"]
    for owned, shard, num_shards in [(range(layers), 0, 1), (range(layers - 1, layers), 1, 2), (range(7, 8), 2, 4)]:
        check_shard(checkpoint, full, stage_manifest(checkpoint.config, owned, shard, num_shards))


MEASURED = """
import sys, json, time
from pathlib import Path
import torch
import gguf.quants
from mpiinfer.model.formats import DenseWeight
from mpiinfer.model.manifest import stage_manifest
from mpiinfer.weights.checkpoint import open_checkpoint
from mpiinfer.weights.load import load

def bytes_read():
    return int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")))

checkpoint = open_checkpoint(Path(sys.argv[1]))
checkpoint.check()
manifest = stage_manifest(checkpoint.config, range(checkpoint.config.num_layers), 0, 2)
weights = {p.name: DenseWeight(p.shape, torch.float32, torch.device("cpu")) for p in manifest}
before = bytes_read()
report = load(checkpoint, manifest, weights)
after = bytes_read()
peak_kib = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
print(json.dumps({
    "counted": after - before,
    "read": report.bytes_read,
    "shard": report.shard_bytes_in_file,
    "seconds": report.seconds,
    "over": peak_kib * 1024 - sum(weight.num_bytes for weight in weights.values()),
}))
"""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's accounting in /proc/self")
def test_real_model_reads_its_shard_only_and_stays_small(real_gguf: Path) -> None:
    """Shard 0 of 2 in a process of its own. VmHWM, since ru_maxrss of a child begins at its parent's size."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, str(real_gguf)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    measured = json.loads(run.stdout)
    assert measured["read"] <= 1.02 * measured["shard"]
    assert measured["counted"] <= measured["read"] + 65536, "what the kernel counted"
    assert measured["over"] <= 400 << 20, f"peak is {measured['over'] >> 20} MiB above the weights"
