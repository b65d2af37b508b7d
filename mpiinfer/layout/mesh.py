"""`Mesh`: the opened domains of one model on this rank, closed in reverse order by a context manager.

Plans, results and the user's objects travel on `model` and `replica` (control); activations on `pp` and sums on `tp`
(data). No two of them share a communicator, so a plan can never be taken for an activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from mpiinfer.comm.device import Backend, open_device
from mpiinfer.comm.domain import Domain
from mpiinfer.comm.network import Network
from mpiinfer.layout.grid import Grid, Place


class OpenPlane(Protocol):
    """Gives a data domain its device plane; told whether it will carry collectives, or sends between neighbours."""

    def __call__(self, domain: Domain, *, collectives: bool, edges: bool) -> Domain: ...


def host_plane(domain: Domain, *, collectives: bool, edges: bool) -> Domain:
    """The plane of CPUs: the host domain itself."""
    return domain


def data_plane(wanted: str, device: torch.device, network: Network) -> OpenPlane:
    """The plane for [comm] device = `wanted` on a rank that computes on `device`: NCCL on GPUs, MPI on CPUs, and gloo
    where a test asks for it."""
    if device.type == "cpu" and wanted != "gloo":
        return host_plane
    backend: Backend = "gloo" if wanted == "gloo" else "nccl"
    return partial(open_device, backend=backend, device=device, network=network)


@dataclass(frozen=True)
class Mesh:
    """My place, and the domains I am in.

    model: all ranks of the model, head first. replica: one data-parallel copy, its head first.
    heads: the heads of all replicas, on those ranks only. tp: the shards of my stage. pp: my shard's stages, first to
    last.
    """

    place: Place
    model: Domain
    replica: Domain
    heads: Domain | None
    tp: Domain
    pp: Domain

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all domains, children first. Collective."""
        for domain in reversed(self.domains):
            domain.close()

    @property
    def domains(self) -> tuple[Domain, ...]:
        heads = () if self.heads is None else (self.heads,)
        return (self.model, self.replica, *heads, self.tp, self.pp)


def open_mesh(world: Domain, grid: Grid, open_plane: OpenPlane = host_plane) -> Mesh:
    """Carve the domains of `grid` out of `world`, by splits. Collective over all of `world`."""
    rank = world.rank
    place = grid.place(rank)
    position = grid.ranks.index(rank)
    model = _split(world, 0, position, "model")
    replica = _split(model, place.replica, position, f"replica{place.replica}")
    heads = model.split(0 if replica.is_first else None, place.replica, name="heads")
    tp = _split(replica, place.stage, place.shard, f"tp{place.replica}.{place.stage}")
    pp = _split(replica, place.shard, place.stage, f"pp{place.replica}.{place.shard}")
    tp = open_plane(tp, collectives=True, edges=False)
    pp = open_plane(pp, collectives=False, edges=True)
    return Mesh(place=place, model=model, replica=replica, heads=heads, tp=tp, pp=pp)


def _split(parent: Domain, color: int, key: int, name: str) -> Domain:
    child = parent.split(color, key, name=name)
    assert child is not None
    return child
