"""Which rule sums each torch dtype over MPI: native, staged through float32, or refused.

Summing bfloat16 as 16-bit integers turns 1 + 1 into 1.7e38, so a dtype without a native MPI type is never mapped to
"something of the same width". What the MPI library has is asked, not assumed.
"""

from __future__ import annotations

import torch
from mpi4py import MPI

from mpiinfer.errors import DomainError

_NATIVE: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_OPTIONAL = {torch.float16: "FLOAT16_T", torch.bfloat16: "BFLOAT16_T"}


def sum_type(dtype: torch.dtype) -> MPI.Datatype | None:
    """The MPI datatype that sums `dtype` natively, or None: sum it staged through float32.

    Raises DomainError for a dtype that has no meaningful sum here.
    """
    native = _NATIVE.get(dtype)
    if native is not None:
        return native
    name = _OPTIONAL.get(dtype)
    if name is None:
        raise DomainError(f"{dtype} cannot be summed over ranks; convert it to float32 or int64 first")
    optional = getattr(MPI, name, MPI.DATATYPE_NULL)
    return None if optional == MPI.DATATYPE_NULL else optional


def rules() -> dict[str, str]:
    """dtype name -> "native" or "staged through float32", for `doctor`."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NATIVE, *_OPTIONAL)}
    return {name: "native" if sum_type(dtype) else "staged through float32" for name, dtype in names.items()}
