"""`Checkpoint`: a model's files as one value, whatever their format. Reads headers and configs, imports no torch.

It pickles, so that one rank can open the files and hand the value to the others. The tokenizer is built elsewhere, from
`path` (a folder) or `metadata` (a GGUF file).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiinfer.errors import ModelError
from mpiinfer.model.config import ModelConfig, config_from_gguf, config_from_hf
from mpiinfer.weights.gguf import gguf_name, read_gguf
from mpiinfer.weights.index import CheckpointIndex, read_folder_index, read_json
from mpiinfer.weights.slices import check_names

GGUF_SUFFIX = ".gguf"


@dataclass(frozen=True)
class Checkpoint:
    """path: the folder or the .gguf file. metadata: a GGUF file's own keys and values, empty for a folder."""

    path: Path
    config: ModelConfig
    index: CheckpointIndex
    metadata: Mapping[str, Any]

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == GGUF_SUFFIX

    def digest(self) -> str:
        """A hash of where each tensor stands and what it looks like, the same for equal files in any folder."""
        entries = self.index.entries
        facts = [(name, e.file.name, e.offset, e.num_bytes, e.shape, e.encoding.name) for name, e in entries.items()]
        return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()

    def check(self) -> None:
        """Raise CheckpointError where a tensor of the model is missing, unclaimed or of another shape."""
        check_names(self.config, self.index, gguf_name if self.is_gguf else str)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder or a .gguf file.

    Raises ModelError where `path` is neither or its config is missing, damaged or not supported, and CheckpointError
    where the weights' headers are.
    """
    if path.is_dir():
        return _open_folder(path)
    if path.suffix != GGUF_SUFFIX:
        what = "neither a folder nor a .gguf file" if path.exists() else "not found"
        raise ModelError(f"{path}: {what}: give a folder with config.json and safetensors, or a .gguf file")
    if not path.is_file():
        raise ModelError(f"{path}: not found: give a folder with config.json and safetensors, or a .gguf file")
    return _open_gguf(path)


def _open_folder(folder: Path) -> Checkpoint:
    config_file = folder / "config.json"
    if not config_file.is_file():
        ggufs = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
        fix = f"give the file itself, {ggufs[0]}" if ggufs else "a model folder holds config.json and safetensors"
        raise ModelError(f"{config_file}: missing: {fix}")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file, ModelError) if generation_file.is_file() else None
    config = config_from_hf(str(config_file), read_json(config_file, ModelError), generation)
    return Checkpoint(folder, config, read_folder_index(folder), {})


def _open_gguf(file: Path) -> Checkpoint:
    header = read_gguf(file)
    config = config_from_gguf(str(file), header.metadata, header.tensors.keys(), header.rope_factors())
    return Checkpoint(file, config, header.index(config), header.metadata)
