"""Rotary position embedding: the table of angles, and the rotation (Su et al., 2021; halves paired, as in GPT-NeoX).

Shapes: T tokens, H heads, d head_dim, h = d / 2.
"""

from __future__ import annotations

import math

import torch

from mpiinfer.model.config import Rope


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair: float32 [head_dim / 2].

    Source of the llama3 rule: the Llama 3.1 release; wavelengths above original/low are stretched by `factor`, those
    below original/high stay, between them the two are blended.
    """
    exponents_h = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base_h = 1.0 / (rope.theta**exponents_h)
    if rope.kind == "linear":
        return base_h / rope.factor
    if rope.kind == "factors":
        return base_h / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        turns_h = rope.original_max_positions * base_h / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        kept_h = ((turns_h - rope.low_freq_factor) / span).clamp(0, 1)
        return kept_h * base_h + (1 - kept_h) * base_h / rope.factor
    return base_h


class Rotation:
    """The angles of one step's tokens, computed once and applied in every layer."""

    def __init__(self, frequencies_h: torch.Tensor, positions_T: torch.Tensor, dtype: torch.dtype) -> None:
        angles_Th = positions_T.to(torch.float32).unsqueeze(1) * frequencies_h
        self.cos_Th = angles_Th.cos().to(dtype)
        self.sin_Th = angles_Th.sin().to(dtype)

    def __call__(self, x_THd: torch.Tensor) -> torch.Tensor:
        """x_THd rotated by its tokens' positions; a new tensor of the same shape."""
        low_THh, high_THh = x_THd.chunk(2, dim=-1)
        cos, sin = self.cos_Th.unsqueeze(1), self.sin_Th.unsqueeze(1)
        return torch.cat((low_THh * cos - high_THh * sin, high_THh * cos + low_THh * sin), dim=-1)
