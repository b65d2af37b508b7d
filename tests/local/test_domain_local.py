"""The contracts of `Domain` over threads, plain and with a gloo device plane."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mpiinfer.comm.device import DeviceDomain, open_device
from mpiinfer.comm.domain import Domain
from mpiinfer.comm.launch import adopt, choose_device
from mpiinfer.comm.local import run_local
from mpiinfer.comm.solo import SoloDomain
from mpiinfer.errors import AbortedError, DomainError, LaunchError, LayoutError, UsageError
from tests.contracts import HOST_CONTRACTS, PLANE_CONTRACTS, Check, FailureContract, check_id, checks

HOST = checks(*HOST_CONTRACTS)
PLANE = checks(*PLANE_CONTRACTS)
FAILURES = checks(FailureContract)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("check", HOST, ids=check_id)
def test_contract(check: Check, size: int) -> None:
    run_local(size, check)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", FAILURES, ids=check_id)
def test_failure(check: Check, size: int) -> None:
    run_local(size, check)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", PLANE, ids=check_id)
def test_contract_over_gloo(check: Check, size: int) -> None:
    def work(domain: Domain) -> None:
        world = adopt(domain, deadline_s=20)
        plane = open_device(world.domain, "gloo", torch.device("cpu"), world.network)
        check(plane)
        plane.close()

    run_local(size, work)


def test_gloo_failure_is_quarantined() -> None:
    def work(domain: Domain) -> None:
        world = adopt(domain, deadline_s=20)
        plane = open_device(world.domain, "gloo", torch.device("cpu"), world.network)
        FailureContract().check_a_collective_past_its_deadline(plane)

    run_local(2, work)


def test_gloo_reports_its_address_and_splits_into_host_domains() -> None:
    def work(domain: Domain) -> str:
        world = adopt(domain, deadline_s=20)
        plane = open_device(world.domain, "gloo", torch.device("cpu"), world.network)
        assert isinstance(plane, DeviceDomain) and plane.accounts.verbs == {}
        child = plane.split(0, name="child")
        assert child is not None and not isinstance(child, DeviceDomain)
        again = open_device(child, "gloo", torch.device("cpu"), world.network)
        assert again.all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]
        again.close()
        plane.close()
        assert plane.host.closed
        return plane.address

    addresses = run_local(3, work)
    assert len(set(addresses)) == 1 and addresses[0].startswith("127.0.0.1:")


def test_gloo_refuses_a_tensor_of_another_device() -> None:
    def work(domain: Domain) -> None:
        world = adopt(domain, deadline_s=20)
        plane = open_device(world.domain, "gloo", torch.device("cpu"), world.network)
        with pytest.raises(DomainError, match="a tensor on meta in a domain over gloo on cpu"):
            plane.all_reduce(torch.ones(2, device="meta"))
        plane.close()

    run_local(2, work)


def test_nccl_without_nccl_is_an_error_on_every_rank() -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")

    def work(domain: Domain) -> None:
        world = adopt(domain)
        with pytest.raises(LaunchError, match="install a CUDA build of torch"):
            open_device(world.domain, "nccl", torch.device("cpu"), world.network)

    run_local(2, work)


def test_an_interface_that_is_not_there_is_named() -> None:
    def work(domain: Domain) -> None:
        world = adopt(domain)
        network = replace(world.network, interface="nowhere0")
        with pytest.raises(LaunchError, match=r"MPIINFER_INTERFACE=nowhere0: .* it has .*lo"):
            open_device(world.domain, "gloo", torch.device("cpu"), network)

    run_local(2, work)


def test_hosts_that_do_not_know_each_other_are_named() -> None:
    def work(domain: Domain) -> None:
        world = adopt(domain)
        network = replace(world.network, hosts=("here", "there.invalid"), nodes=(0, 1))
        with pytest.raises(LaunchError, match=r"here has no address that leads to there\.invalid .*MPIINFER_INTERFACE"):
            open_device(world.domain, "gloo", torch.device("cpu"), network)

    run_local(2, work)


def test_a_collective_that_ranks_call_differently_is_named() -> None:
    def work(domain: Domain) -> None:
        domain.all_reduce(torch.ones(2 + domain.rank))

    with pytest.raises(DomainError, match="meet in different collectives"):
        run_local(2, work)


@pytest.mark.parametrize("size", [1, 2])
def test_a_receive_of_another_shape_is_named(size: int) -> None:
    def work(domain: Domain) -> None:
        outgoing = domain.isend(torch.ones(3), domain.next)
        with pytest.raises(DomainError, match="receives"):
            domain.irecv(torch.ones(1), domain.prev).wait()
        outgoing.wait()

    run_local(size, work)


def test_the_first_failure_is_the_one_raised() -> None:
    def work(domain: Domain) -> None:
        if domain.rank == 1:
            raise KeyError("the cause")
        domain.barrier()

    with pytest.raises(KeyError, match="the cause"):
        run_local(3, work)


def test_adopted_threads_stand_on_one_node() -> None:
    def work(domain: Domain) -> None:
        world = adopt(domain, deadline_s=17)
        assert world.nodes == (0,) * 4 and len(set(world.hosts)) == 1
        assert (world.local_rank, world.num_local) == (domain.rank, 4)
        assert world.domain.waits.deadline_s == 17 and domain.waits.deadline_s != 17
        assert world.domain.name == "world" and world.domain.world_ranks == (0, 1, 2, 3)
        world.close()
        world.close()
        domain.barrier()

    run_local(4, work)


def test_an_adopted_part_numbers_its_ranks_anew() -> None:
    def work(domain: Domain) -> None:
        part = domain.split(domain.rank % 2, name="part")
        assert part is not None and part.world_ranks == (domain.rank % 2, domain.rank % 2 + 2)
        with adopt(part) as world:
            assert world.domain.world_ranks == (0, 1)
            child = world.domain.split(0, -world.domain.rank, name="child")
            assert child is not None and child.world_ranks == (1, 0)

    run_local(4, work)


def test_adopt_wants_a_communicator() -> None:
    with pytest.raises(UsageError, match="must be an intracommunicator"):
        adopt("world")  # type: ignore[arg-type]


def test_choose_device_without_gpus() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    def work(domain: Domain) -> None:
        world = adopt(domain)
        for wanted in ("auto", "mpi", "gloo"):
            assert choose_device(world, wanted) == torch.device("cpu")
        host = world.hosts[0]
        with pytest.raises(LayoutError, match=rf'device = "nccl": on host {host}, ranks 0, 1 .*GPU|NCCL'):
            choose_device(world, "nccl")

    run_local(2, work)


def test_solo_takes_part_in_the_abort_of_its_world() -> None:
    def work(domain: Domain) -> None:
        alone = domain.split(domain.rank, name="alone")
        assert isinstance(alone, SoloDomain)
        if domain.is_first:
            domain.waits.abort.post("elsewhere")
        else:
            with pytest.raises(AbortedError, match="elsewhere"):
                alone.irecv_message(0).wait(idle=True)

    run_local(2, work)
