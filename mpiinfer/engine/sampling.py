"""placeholder until merged"""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int = -1
