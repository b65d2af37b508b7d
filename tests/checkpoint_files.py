"""Checkpoints and model configs for tests, written byte by byte so that they can be wrong in every way.

Promises: needs Python only. The writers check nothing: they put into the file what they are given.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from mpiinfer.model.config import ModelConfig, Rope
from mpiinfer.model.manifest import stage_manifest

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1}


def tiny_config(**changes: Any) -> ModelConfig:
    """A llama of two layers, five query heads over five key/value heads, in sizes that divide by nothing."""
    values: dict[str, Any] = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 20,
        "num_heads": 5,
        "num_kv_heads": 5,
        "head_dim": 4,
        "intermediate_size": 37,
        "vocab_size": 53,
        "max_positions": 64,
        "rms_eps": 1e-5,
        "rope": Rope(theta=10000.0),
    }
    return ModelConfig(**(values | changes))


def tensors_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that the checkpoint of a model holds, by canonical name."""
    manifest = stage_manifest(config, range(config.num_layers), 0, 1)
    return {piece.tensor: piece.shape for parameter in manifest for piece in parameter.pieces}


def write_safetensors(file: Path, shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> Path:
    """A well-formed file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        stop = at + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    return write_header(file, json.dumps(header), at)


def write_header(file: Path, header: str, data_bytes: int) -> Path:
    """A file with any text as its header, and zeros behind it."""
    raw = header.encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))
    return file


def hf_values(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of a llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tied_embeddings,
    }


def write_folder(folder: Path, config: ModelConfig) -> Path:
    """A whole model of zeros: config.json and model.safetensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_values(config)))
    write_safetensors(folder / "model.safetensors", tensors_of(config))
    return folder


class GgufBytes:
    """The parts of a GGUF file, to be joined: `header()` and the zeros behind it."""

    def __init__(self, version: int = 3) -> None:
        self.version = version
        self.keys: list[bytes] = []
        self.tensors: list[bytes] = []

    @staticmethod
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def key(self, name: str, kind: int, value: bytes) -> GgufBytes:
        self.keys.append(self.string(name) + struct.pack("<I", kind) + value)
        return self

    def tensor(self, name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> GgufBytes:
        """`shape` outermost first, as everywhere but in the file."""
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        self.tensors.append(self.string(name) + dims + struct.pack("<IQ", kind, offset))
        return self

    def header(self) -> bytes:
        counts = struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))
        return b"GGUF" + counts + b"".join(self.keys) + b"".join(self.tensors)

    def write(self, file: Path, data_bytes: int = 0, alignment: int = 32) -> Path:
        header = self.header()
        file.write_bytes(header + bytes(-len(header) % alignment + data_bytes))
        return file
