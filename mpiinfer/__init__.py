"""Large language model inference as an MPI program.

>>> from mpiinfer import Engine, Layout, SamplingParams  # doctest: +SKIP

The names below are loaded when they are first used: importing the package starts neither torch nor MPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiinfer.engine.engine import Engine
    from mpiinfer.engine.request import Output, SamplingParams
    from mpiinfer.errors import MpiinferError
    from mpiinfer.layout.spec import Layout

__all__ = ["Engine", "Layout", "MpiinferError", "Output", "SamplingParams"]

_HOMES = {
    "Engine": "mpiinfer.engine.engine",
    "Layout": "mpiinfer.layout.spec",
    "MpiinferError": "mpiinfer.errors",
    "Output": "mpiinfer.engine.request",
    "SamplingParams": "mpiinfer.engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpiinfer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
