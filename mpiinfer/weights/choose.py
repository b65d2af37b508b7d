"""Which format each weight of a stage is held in: what `--weights` means, for a checkpoint and a device.

Promises: one format for a weight, whatever the number of tokens it is multiplied with, so that a batch never changes a
request's tokens. Blocks that a file holds and that a format can hold are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mpiinfer.errors import UsageError
from mpiinfer.model.formats import DenseWeight, Weight
from mpiinfer.model.manifest import Parameter
from mpiinfer.model.panels import DTYPES, DenseName, PanelWeight
from mpiinfer.model.quantised import BLOCK, Bits, QuantisedWeight
from mpiinfer.weights.decode import BLOCK_BITS
from mpiinfer.weights.index import CheckpointIndex

# exact: fp32 on a CPU, as in the file on a GPU. native: as in the file. auto: the fastest whose perplexity is within
# 1 % of fp32 (README has the figures): blocks of 8 bits, or the file's own.
CHOICES = ("exact", "fp32", "bf16", "fp16", "int8", "int4", "native", "auto")
_CHECKPOINT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DENSE_NAMES: dict[str, DenseName] = {"F16": "fp16", "BF16": "bf16"}
_DENSE_CHOICES: dict[str, DenseName] = {"exact": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def compute_dtype(choice: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of activations: float32 on a CPU, whatever the weights are held in; that of the weights on a GPU.

    Raises UsageError for an unknown choice, and for one that this device has no kernel of.
    """
    if choice not in CHOICES:
        raise UsageError(f"--weights {choice}: unknown format; known are {', '.join(CHOICES)}")
    if device.type == "cpu":
        return torch.float32
    if choice in ("int8", "int4"):
        raise UsageError(f"--weights {choice}: runs on CPUs only; on a GPU take bf16, fp16, fp32 or native")
    return DTYPES[choice if choice in DTYPES else _CHECKPOINT_DTYPES.get(checkpoint_dtype, "fp32")]


def new_weight(
    parameter: Parameter, choice: str, index: CheckpointIndex, dtype: torch.dtype, device: torch.device
) -> Weight:
    """An empty weight for `parameter`, as `choice` says. dtype: `compute_dtype`."""
    if len(parameter.shape) == 1 or device.type != "cpu":
        return DenseWeight(parameter.shape, dtype, device)
    encodings = {index.entries[piece.tensor].encoding.name for piece in parameter.pieces}
    if choice in _DENSE_CHOICES:
        return PanelWeight(parameter.shape, _DENSE_CHOICES[choice])
    if choice == "native" and not any(_is_quantised(parameter, index)):
        names = {_DENSE_NAMES.get(encoding, "fp32") for encoding in encodings}
        return PanelWeight(parameter.shape, names.pop() if len(names) == 1 else "fp32")
    has_minimum, bits = "Q4_1" in encodings, _bits(choice, encodings)
    if bits == 4:
        has_minimum |= not encodings <= {
            "Q4_0"
        }  # numbers of another kind are rounded, from the smallest to the largest
    lead = parameter.pieces[0].ranges[1].start % BLOCK if encodings & BLOCK_BITS.keys() else 0
    return QuantisedWeight(parameter.shape, bits, has_minimum=has_minimum, lead=lead)


def _is_quantised(parameter: Parameter, index: CheckpointIndex) -> Iterable[bool]:
    return (index.entries[piece.tensor].encoding.is_quantised for piece in parameter.pieces)


def _bits(choice: str, encodings: set[str]) -> Bits:
    if choice == "int8":
        return 8
    if choice == "int4":
        return 4
    return 8 if any(BLOCK_BITS.get(encoding, 8) == 8 for encoding in encodings) else 4
