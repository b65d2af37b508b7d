"""The device plane over NCCL, on GPUs. Skipped with a reason where there are none, or too few."""

from __future__ import annotations

import sys

import pytest
import torch

from mpiinfer.comm.device import DeviceDomain
from mpiinfer.comm.launch import adopt, choose_device
from mpiinfer.comm.solo import SoloDomain
from mpiinfer.errors import DomainError
from tests.contracts import AccountContract, CollectiveContract, check_id, checks
from tests.launching import run_world

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

needs_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason="torch sees no CUDA GPU on this machine")
needs_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"NCCL between ranks needs 2 GPUs, torch sees {NUM_GPUS}")

CUDA = torch.device("cuda", 0)
# Sends to oneself are not NCCL's, so one rank tries the collectives.
ALONE = checks(CollectiveContract, AccountContract, device=CUDA)
IN_ONE_RANK = [check for check in ALONE if check.__name__ != "check_calls_and_bytes"]


@needs_gpu
@pytest.mark.parametrize("check", IN_ONE_RANK, ids=check_id)
def test_one_rank(check: object) -> None:
    world = adopt(SoloDomain())
    with DeviceDomain(world.domain, "nccl", CUDA, world.network) as plane:
        plane.warm(edges=False)
        check(plane)  # type: ignore[operator]


@needs_gpu
def test_a_host_tensor_is_refused() -> None:
    world = adopt(SoloDomain())
    with (
        DeviceDomain(world.domain, "nccl", CUDA, world.network) as plane,
        pytest.raises(DomainError, match="a tensor on cpu in a domain over nccl on cuda:0"),
    ):
        plane.all_reduce(torch.ones(3))


@needs_gpu
def test_abandoning_does_not_wait() -> None:
    world = adopt(SoloDomain())
    plane = DeviceDomain(world.domain, "nccl", CUDA, world.network)
    plane.warm(edges=False)
    plane._abandon()


@needs_gpu
def test_choose_device_takes_a_gpu() -> None:
    assert choose_device(adopt(SoloDomain()), "auto") == CUDA
    assert choose_device(adopt(SoloDomain()), "mpi") == torch.device("cpu")


CONTRACTS = """
import torch
from mpiinfer.comm.device import DeviceDomain, open_device
from mpiinfer.comm.launch import choose_device, launch
from tests.contracts import *

world = launch(deadline_s=60)
device = choose_device(world, "nccl")
torch.cuda.set_device(device)
seen = world.domain.bcast_object(world.domain.gather_object(str(torch.cuda.get_device_properties(device).uuid)))
assert len(set(seen)) == world.domain.size, seen
for generation, check in enumerate(
    checks(PlaceContract, CollectiveContract, NeighbourContract, AccountContract, device=device)
):
    part = world.domain.split(0, name="plane")
    with open_device(part, "nccl", device, world.network, generation=generation) as plane:
        assert isinstance(plane, DeviceDomain)
        check(plane)
    if world.domain.is_first:
        print(check_id(check), "ok", flush=True)
world.close()
"""

DEADLINE = """
import torch
from mpiinfer.comm.device import open_device
from mpiinfer.comm.launch import choose_device, launch
from tests.contracts import FailureContract

world = launch(deadline_s=20)
device = choose_device(world, "nccl")
plane = open_device(world.domain, "nccl", device, world.network)
FailureContract().expect_deadline(plane, "all_reduce", lambda: plane.all_reduce(torch.ones(8, device=device)))
print("quarantined", flush=True)
"""


@needs_gpus
def test_contracts_between_gpus() -> None:
    result = run_world(min(NUM_GPUS, 4), [sys.executable, "-c", CONTRACTS], timeout_s=300)
    assert result.returncode == 0, result.shown()
    assert result.stdout.count(" ok\n") > 20, result.shown()


@needs_gpus
def test_a_deadline_between_gpus() -> None:
    result = run_world(2, [sys.executable, "-c", DEADLINE], timeout_s=120)
    assert result.stdout.count("quarantined") == 2, result.shown()
