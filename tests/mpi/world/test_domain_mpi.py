"""The contracts of `Domain` over MPI, plain and with a gloo device plane, in a world of each size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mpi4py import MPI

from mpiinfer.comm.device import DeviceDomain, open_device
from mpiinfer.comm.domain import Domain
from mpiinfer.comm.launch import World, adopt, choose_device
from mpiinfer.comm.mpi import MAX_MESSAGE_BYTES, MpiDomain
from mpiinfer.comm.solo import SoloDomain
from mpiinfer.errors import DomainError, LayoutError, UsageError
from tests.contracts import HOST_CONTRACTS, PLANE_CONTRACTS, Check, FailureContract, check_id, checks

HOST = checks(*HOST_CONTRACTS)
PLANE = checks(*PLANE_CONTRACTS)


@pytest.fixture
def adopted(world: MPI.Intracomm) -> Iterator[World]:
    with adopt(world, deadline_s=30) as adopted:
        yield adopted


@pytest.mark.parametrize("check", HOST, ids=check_id)
def test_contract(check: Check, adopted: World) -> None:
    check(adopted.domain)


@pytest.mark.parametrize("check", PLANE, ids=check_id)
def test_contract_over_gloo(check: Check, adopted: World) -> None:
    part = adopted.domain.split(0, name="plane")
    assert part is not None
    with open_device(part, "gloo", torch.device("cpu"), adopted.network) as plane:
        assert isinstance(plane, (DeviceDomain, SoloDomain))
        check(plane)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("check", checks(FailureContract), ids=check_id)
def test_failure(check: Check, world: MPI.Intracomm) -> None:
    """After each of these the next test makes new domains over the same ranks: an abandoned one does no harm."""
    check(adopt(world, deadline_s=30).domain)
    world.Barrier()


@pytest.mark.ranks(at_least=2)
def test_gloo_failure_is_quarantined(world: MPI.Intracomm) -> None:
    adopted = adopt(world, deadline_s=30)
    plane = open_device(adopted.domain, "gloo", torch.device("cpu"), adopted.network)
    FailureContract().check_a_collective_past_its_deadline(plane)
    world.Barrier()


def test_world_facts(adopted: World, world: MPI.Intracomm) -> None:
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    assert (adopted.local_rank, adopted.num_local) == (node.rank, node.size)
    node.Free()
    assert len(adopted.hosts) == len(adopted.nodes) == world.size and adopted.nodes[0] == 0
    assert (adopted.domain.name, adopted.domain.rank, adopted.domain.size) == ("world", world.rank, world.size)
    assert adopted.num_threads >= 1 and adopted.num_cores >= 1
    assert len(set(world.allgather(adopted.network))) == 1


def test_adopt_leaves_the_communicator_to_its_owner(world: MPI.Intracomm) -> None:
    """Both send with the tags that a domain uses, and neither hears the other."""
    theirs = world.Dup()
    threads_before = torch.get_num_threads()
    with adopt(theirs) as adopted:
        own = theirs.isend("theirs", (world.rank + 1) % world.size, tag=2)
        message = adopted.domain.isend_message(b"ours", adopted.domain.next)
        assert adopted.domain.irecv_message(adopted.domain.prev).wait() == b"ours"
        message.wait()
        assert theirs.recv(source=(world.rank - 1) % world.size, tag=2) == "theirs"
        own.wait()
    assert torch.get_num_threads() == threads_before
    theirs.Barrier()
    theirs.Free()


def test_adopt_a_part_of_the_world(world: MPI.Intracomm) -> None:
    half = world.Split(world.rank % 2, -world.rank)
    with adopt(half) as adopted:
        assert adopted.domain.world_ranks == tuple(range(half.size)) and adopted.domain.rank == half.rank
        with adopt(adopted.domain) as again:
            assert again.domain.all_reduce(torch.ones(1)).item() == half.size
        assert adopted.domain.all_reduce(torch.ones(1)).item() == half.size
    half.Free()


@pytest.mark.ranks(at_least=2)
def test_adopt_refuses_what_it_is_no_member_of(world: MPI.Intracomm) -> None:
    with pytest.raises(UsageError, match="must be an intracommunicator"):
        adopt(MPI.COMM_NULL)


def test_opening_and_closing_worlds_frees_communicators(world: MPI.Intracomm) -> None:
    """MPICH has 2,046 communicators in all; each world takes two."""
    for _ in range(1_100):
        adopt(world).close()


@pytest.mark.ranks(at_least=2)
def test_a_tensor_above_the_message_limit(adopted: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpiinfer.comm.mpi.MAX_MESSAGE_BYTES", 1_000)
    assert MAX_MESSAGE_BYTES == 1 << 30
    domain = adopted.domain
    sent, received = torch.arange(1_234, dtype=torch.int32) + domain.rank, torch.empty(1_234, dtype=torch.int32)
    incoming = domain.irecv(received, domain.prev)
    domain.isend(sent, domain.next).wait()
    incoming.wait()
    assert torch.equal(received, torch.arange(1_234, dtype=torch.int32) + domain.prev)
    domain.broadcast(received, 1)
    assert torch.equal(received, torch.arange(1_234, dtype=torch.int32))


@pytest.mark.ranks(at_least=2)
def test_ranks_alone_after_a_split_hold_no_communicator(adopted: World) -> None:
    alone = adopted.domain.split(adopted.domain.rank, name="alone")
    together = adopted.domain.split(0, name="together")
    assert isinstance(alone, SoloDomain) and isinstance(together, MpiDomain)
    together.close()
    alone.close()


def test_a_dtype_without_a_sum_is_refused(adopted: World) -> None:
    if adopted.domain.size > 1:
        with pytest.raises(DomainError, match="cannot be summed over ranks"):
            adopted.domain.all_reduce(torch.ones(3, dtype=torch.uint8))


def test_choose_device_agrees(adopted: World) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert choose_device(adopted, "auto") == torch.device("cpu")
    with pytest.raises(LayoutError, match='device = "nccl"'):
        choose_device(adopted, "nccl")


@pytest.mark.ranks(2, 4)
def test_disjoint_gloo_planes_at_once(adopted: World) -> None:
    """Torch's own groups, made by their members only, get cross-wired here."""
    pair = adopted.domain.split(adopted.domain.rank // 2, name="pair")
    assert pair is not None
    for generation in range(3):
        part: Domain | None = pair.split(0, name="part")
        assert part is not None
        with open_device(part, "gloo", torch.device("cpu"), adopted.network, generation=generation) as plane:
            value = 10.0 ** (adopted.domain.rank // 2)
            assert plane.all_reduce(torch.full((50,), value)).tolist() == [2 * value] * 50
    pair.close()


@pytest.mark.ranks(2)
def test_an_interface_can_be_named(world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIINFER_INTERFACE", "lo")
    with adopt(world) as adopted:
        part = adopted.domain.split(0, name="part")
        assert part is not None
        with open_device(part, "gloo", torch.device("cpu"), adopted.network) as plane:
            assert isinstance(plane, DeviceDomain) and plane.address.startswith("127.0.0.1:")
