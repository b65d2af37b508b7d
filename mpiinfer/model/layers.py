"""The parts of a decoder layer. A part that is split over shards takes its tensor domain; it asks for nothing else.

Shapes: T tokens of the step, D hidden size, I a local input width, O a local output width, V local vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from mpiinfer.comm.domain import Domain
from mpiinfer.model.formats import LinearWeight
from mpiinfer.model.kernels import library

ACTIVATION_OF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation over the last dim, in float32 (Zhang and Sennrich, 2019). x's shape and dtype."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def add_rms_norm(
    stream_TD: torch.Tensor, update_TD: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `update_TD` to the stream in place; return the norm of the sum, [T, D]."""
    kernels = library()
    if kernels is None or not _suits_kernels(stream_TD):
        if update_TD is not None:
            stream_TD += update_TD
        return rms_norm(stream_TD, weight, eps)
    out_TD = torch.empty_like(stream_TD)
    update = None if update_TD is None else update_TD.data_ptr()
    num_tokens, width = stream_TD.shape
    kernels.add_rms_norm(stream_TD.data_ptr(), update, weight.data_ptr(), out_TD.data_ptr(), num_tokens, width, eps)
    return out_TD


def _suits_kernels(x: torch.Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and x.is_contiguous()


class ColumnLinear:
    """Each shard computes its own output columns; no communication."""

    def __init__(self, weight: LinearWeight, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = self.weight(x_TI)
        return y_TO if self.bias is None else y_TO.add_(self.bias)


class RowLinear:
    """Each shard multiplies its own input columns; the sum over the shards is the output. The bias is added once."""

    def __init__(self, weight: LinearWeight, bias: torch.Tensor | None, tp: Domain) -> None:
        self.weight = weight
        self.bias = bias
        self.tp = tp

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        y_TD = self.tp.all_reduce(self.weight(x_TI))
        return y_TD if self.bias is None else y_TD.add_(self.bias)


class VocabularyEmbedding:
    """Each shard looks up the ids in its own vocabulary rows; the others are zero in the sum."""

    def __init__(self, weight: LinearWeight, rows: range, tp: Domain) -> None:
        self.weight = weight
        self.rows = rows
        self.tp = tp

    def __call__(self, ids_T: torch.Tensor) -> torch.Tensor:
        """ids_T int64 [T] of the whole vocabulary: [T, D]."""
        local_T = ids_T - self.rows.start
        foreign_T = (local_T < 0) | (local_T >= len(self.rows))
        hidden_TD = self.weight.rows(local_T.masked_fill(foreign_T, 0))
        return self.tp.all_reduce(hidden_TD.masked_fill_(foreign_T.unsqueeze(1), 0))


class GatedMlp:
    """down(activation(gate(x)) * up(x)), with gate and up stacked in one matrix."""

    def __init__(self, gate_up: ColumnLinear, down: RowLinear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.is_silu = activation == "silu"
        self.activation = ACTIVATION_OF[activation]

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down(self._activated(self.gate_up(x_TD)))

    def _activated(self, both_TI: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up of gate and up side by side."""
        kernels = library()
        if kernels is None or not self.is_silu or not _suits_kernels(both_TI):
            gate_TI, up_TI = both_TI.chunk(2, dim=-1)
            return self.activation(gate_TI) * up_TI
        num_tokens, width = both_TI.shape[0], both_TI.shape[1] // 2
        out_TI = torch.empty((num_tokens, width))
        kernels.silu_multiply(both_TI.data_ptr(), out_TI.data_ptr(), num_tokens, width)
        return out_TI
