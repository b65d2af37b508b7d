"""Opening a model's files: what a folder or a .gguf file gives, and one line for each thing that is wrong with one."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mpiinfer.errors import CheckpointError, ModelError, MpiinferError
from mpiinfer.weights.checkpoint import open_checkpoint
from tests.checkpoint_files import (
    GgufBytes,
    hf_values,
    tensors_of,
    tiny_config,
    write_folder,
    write_safetensors,
)


def refused(path: Path, kind: type[MpiinferError] = ModelError) -> str:
    with pytest.raises(kind) as error:
        open_checkpoint(path).check()
    text = str(error.value)
    assert "\n" not in text and str(path) in text
    return text


def test_folder(tmp_path: Path) -> None:
    config = tiny_config(tied_embeddings=True)
    folder = write_folder(tmp_path / "m", config)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    checkpoint = open_checkpoint(folder)
    checkpoint.check()
    assert checkpoint.config.num_heads == config.num_heads and checkpoint.config.tied_embeddings
    assert checkpoint.config.eos_token_ids == {3, 4}
    assert not checkpoint.is_gguf and checkpoint.metadata == {}
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint


def test_neither_folder_nor_gguf(tmp_path: Path) -> None:
    assert "not found" in refused(tmp_path / "nothing")
    assert "not found" in refused(tmp_path / "nothing.gguf")
    (tmp_path / "model.bin").touch()
    assert "neither a folder nor a .gguf file" in refused(tmp_path / "model.bin")


def test_config_missing(tmp_path: Path) -> None:
    assert f"{tmp_path / 'config.json'}: missing" in refused(tmp_path)
    (tmp_path / "m.Q4_1.gguf").touch()
    assert f"give the file itself, {tmp_path / 'm.Q4_1.gguf'}" in refused(tmp_path)


@pytest.mark.parametrize(("content", "problem"), [("{", "not valid JSON"), ("[]", "JSON object"), ("\xff", "JSON")])
def test_config_is_no_json(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    text = refused(tmp_path)
    assert str(tmp_path / "config.json") in text and problem in text


@pytest.mark.parametrize(
    "key",
    [
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
        *("max_position_embeddings", "rms_norm_eps"),
    ],
)
def test_config_without_a_needed_key(tmp_path: Path, key: str) -> None:
    values = hf_values(tiny_config())
    del values[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    text = refused(tmp_path)
    assert str(tmp_path / "config.json") in text and repr(key) in text


def test_unknown_architecture(tmp_path: Path) -> None:
    values = hf_values(tiny_config()) | {"architectures": ["OtherForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    text = refused(tmp_path)
    assert "OtherForCausalLM" in text and "LlamaForCausalLM" in text


def test_tensors_that_do_not_fit_the_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tiny_config())
    file = folder / "model.safetensors"
    shapes: dict[str, Any] = tensors_of(tiny_config())
    write_safetensors(file, {name: shape for name, shape in shapes.items() if name != "model.norm.weight"})
    assert "'model.norm.weight' is missing" in refused(folder, CheckpointError)
    write_safetensors(file, shapes | {"model.extra.weight": (1,)})
    assert f"{file}: tensor 'model.extra.weight' is not part" in refused(folder, CheckpointError)
    write_safetensors(file, shapes | {"model.norm.weight": (21,)})
    assert f"{file}: tensor 'model.norm.weight' has shape [21]" in refused(folder, CheckpointError)
    write_safetensors(file, shapes, "I64")
    assert "dtype I64" in refused(folder, CheckpointError)


def gguf_parts(**skipped: object) -> GgufBytes:
    parts = GgufBytes().key("general.architecture", 8, GgufBytes.string("llama"))
    numbers = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 8,
        "feed_forward_length": 6,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "vocab_size": 10,
    }
    for key, value in numbers.items():
        if key not in skipped:
            parts.key(f"llama.{key}", 4, struct.pack("<I", value))
    return parts.key("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))


GGUF_SHAPES = {
    "token_embd.weight": (10, 8),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_norm.weight": (8,),
    "blk.0.ffn_gate.weight": (6, 8),
    "blk.0.ffn_up.weight": (6, 8),
    "blk.0.ffn_down.weight": (8, 6),
    "output_norm.weight": (8,),
}


def write_gguf(file: Path, parts: GgufBytes, shapes: dict[str, tuple[int, ...]]) -> Path:
    at = 0
    for name, shape in shapes.items():
        parts.tensor(name, shape, offset=at)
        at += -(-4 * prod(shape) // 32) * 32
    return parts.write(file, at)


def test_gguf(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_parts(), GGUF_SHAPES)
    checkpoint = open_checkpoint(file)
    checkpoint.check()
    assert checkpoint.is_gguf and checkpoint.metadata["llama.vocab_size"] == 10
    assert checkpoint.config.tied_embeddings and checkpoint.config.head_dim == 4
    assert set(checkpoint.index.entries) == set(tensors_of(checkpoint.config))


def test_gguf_tensors_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    missing = {name: shape for name, shape in GGUF_SHAPES.items() if "ffn_up" not in name}
    assert "'blk.0.ffn_up.weight' is missing" in refused(write_gguf(file, gguf_parts(), missing), CheckpointError)
    extra = GGUF_SHAPES | {"blk.1.attn_norm.weight": (8,)}
    assert "'blk.1.attn_norm.weight' is not part" in refused(write_gguf(file, gguf_parts(), extra), CheckpointError)
    shape = GGUF_SHAPES | {"blk.0.ffn_down.weight": (6, 8)}
    text = refused(write_gguf(file, gguf_parts(), shape), CheckpointError)
    assert "'blk.0.ffn_down.weight' has shape [6, 8]" in text and "[8, 6]" in text
    factors = GGUF_SHAPES | {"rope_freqs.weight": (3,)}
    text = refused(write_gguf(file, gguf_parts(), factors), ModelError)
    assert "rope_freqs.weight has 3 values" in text


def test_gguf_without_a_needed_key(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf_parts(block_count=None), GGUF_SHAPES)
    assert "'block_count'" in refused(file)


def test_unknown_gguf_architecture(tmp_path: Path) -> None:
    file = GgufBytes().key("general.architecture", 8, GgufBytes.string("mamba")).write(tmp_path / "m.gguf")
    text = refused(file)
    assert "'mamba'" in text and "llama" in text


def test_opening_needs_neither_torch_nor_gguf_nor_numpy(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tiny_config())
    code = (
        "import sys; from pathlib import Path; from mpiinfer.weights.source import resolve_model; "
        "from mpiinfer.weights.checkpoint import open_checkpoint; "
        "open_checkpoint(resolve_model(sys.argv[1])).check(); "
        "print([name for name in ('torch', 'gguf', 'numpy', 'mpi4py') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=root)
    assert result.stdout.strip() == "[]", result.stderr
