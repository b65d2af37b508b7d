"""What every member of the `Domain` family promises, written once and run over each of them.

A contract's `check_*` method is called by every rank with its own end of the same domain, so one body serves threads
(`run_local`) and processes (`mpiexec -n N python -m pytest tests/mpi/world`). Checks leave the domain usable, except
those of `FailureContract`, which use it up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from mpiinfer.comm.agree import on_all, on_first, same_on_all
from mpiinfer.comm.domain import Domain
from mpiinfer.errors import AbortedError, DeadlineError, DomainError, LayoutError, UsageError

Check = Callable[[Domain], None]

SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16)
MOVED = (*SUMMED, torch.uint8, torch.bool)
# None, one, a decode step of a small model, and what no MPI sends eagerly.
BYTES = (0, 8, 2_304, 4 << 20)


def checks(*contracts: type, device: torch.device | None = None) -> list[Check]:
    """Every check of some contracts, for parametrize. `device` is where their tensors live, instead of on the CPU."""
    made = [contract() for contract in contracts]
    if device is not None:
        for contract in made:
            contract.device = device
    return [getattr(contract, name) for contract in made for name in vars(type(contract)) if name.startswith("check_")]


def check_id(check: Check) -> str:
    return check.__name__.removeprefix("check_")


def full(num_bytes: int, dtype: torch.dtype, value: float, device: torch.device | None = None) -> torch.Tensor:
    return torch.full((num_bytes // dtype.itemsize,), value, dtype=dtype, device=device)


def expect_members(child: Domain, parent: Domain, members: list[int]) -> None:
    """`child` consists of the parent's ranks `members`, in that order, and works."""
    assert child.world_ranks == tuple(parent.world_ranks[rank] for rank in members)
    assert (child.rank, child.size) == (members.index(parent.rank), len(members))
    assert child.all_gather(torch.tensor([parent.rank])).flatten().tolist() == members


def await_abort(domain: Domain) -> str:
    """The cause that another rank posted, waited for without any verb."""
    until = time.monotonic() + 20
    while (cause := domain.waits.abort.poll()) is None:
        assert time.monotonic() < until, "no abort was posted"
        time.sleep(0.005)
    return cause


class CollectiveContract:
    """Tensor verbs that all ranks call together. `device` is where the tensors live."""

    device = torch.device("cpu")

    def cases(self, dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[int, torch.dtype]]:
        yield from ((num_bytes, dtype) for dtype in dtypes for num_bytes in BYTES)

    def check_all_reduce_sums_in_place(self, domain: Domain) -> None:
        total = sum(range(1, domain.size + 1))
        for num_bytes, dtype in self.cases(SUMMED):
            tensor = full(num_bytes, dtype, domain.rank + 1, self.device)
            assert domain.all_reduce(tensor) is tensor
            assert torch.equal(tensor, torch.full_like(tensor, total)), (num_bytes, dtype)

    def check_all_reduce_of_any_shape(self, domain: Domain) -> None:
        for shape in ((), (1,), (3, 5), (2, 1, 7, 3)):
            tensor = torch.ones(shape, device=self.device)
            assert torch.equal(domain.all_reduce(tensor), torch.full(shape, float(domain.size), device=self.device))

    def check_all_reduce_of_a_slice_leaves_the_rest(self, domain: Domain) -> None:
        tensor = torch.ones(10, device=self.device)
        domain.all_reduce(tensor[3:7])
        expected = [1.0] * 3 + [float(domain.size)] * 4 + [1.0] * 3
        assert tensor.tolist() == expected

    def check_broadcast_from_each_root(self, domain: Domain) -> None:
        for num_bytes, dtype in self.cases(MOVED):
            root = num_bytes % domain.size
            tensor = full(num_bytes, dtype, domain.rank == root, self.device)
            assert domain.broadcast(tensor, root) is tensor
            assert torch.equal(tensor, torch.ones_like(tensor)), (num_bytes, dtype)

    def check_all_gather_stacks_in_rank_order(self, domain: Domain) -> None:
        for num_bytes, dtype in self.cases(MOVED):
            gathered = domain.all_gather(full(num_bytes, dtype, domain.rank % 2, self.device))
            expected = torch.stack([full(num_bytes, dtype, rank % 2, self.device) for rank in range(domain.size)])
            assert gathered.dtype == dtype and torch.equal(gathered, expected), (num_bytes, dtype)

    def check_all_gather_takes_a_strided_view(self, domain: Domain) -> None:
        view = (torch.arange(6.0, device=self.device) + domain.rank).view(2, 3).t()
        gathered = domain.all_gather(view)
        assert gathered.shape == (domain.size, 3, 2)
        assert torch.equal(gathered[domain.rank], view)
        assert gathered[:, 0, 0].tolist() == list(range(domain.size))

    def check_reduce_scatter_returns_my_row(self, domain: Domain) -> None:
        total = sum(range(1, domain.size + 1))
        for num_bytes, dtype in self.cases(SUMMED):
            row = full(num_bytes, dtype, domain.rank + 1, self.device)
            stacked = torch.stack([row * (to + 1) for to in range(domain.size)])
            mine = domain.reduce_scatter(stacked)
            assert mine.shape == row.shape and mine.dtype == dtype
            assert torch.equal(mine, torch.full_like(row, total * (domain.rank + 1))), (num_bytes, dtype)

    def check_barrier_waits_for_the_last(self, domain: Domain) -> None:
        arrived = time.time()
        if domain.is_last:
            time.sleep(0.05)
            arrived = time.time()
        domain.barrier()
        left = time.time()
        last_arrival = domain.bcast_object(arrived, domain.size - 1)
        assert left >= last_arrival - 0.005


class StagedSumContract:
    """bfloat16 is summed through float32 and rounded once."""

    def check_bfloat16_is_rounded_once(self, domain: Domain) -> None:
        tensor = torch.tensor([256.0 if domain.is_first else 1.0, 1.0], dtype=torch.bfloat16)
        domain.all_reduce(tensor)
        expected = torch.tensor([256.0 + domain.size - 1, domain.size]).bfloat16()
        assert torch.equal(tensor, expected)

    def check_bfloat16_reduce_scatter(self, domain: Domain) -> None:
        row = torch.full((3,), 256.0 if domain.is_first else 1.0, dtype=torch.bfloat16)
        mine = domain.reduce_scatter(row.expand(domain.size, 3))
        assert torch.equal(mine, torch.full((3,), 256.0 + domain.size - 1).bfloat16())


class NeighbourContract:
    """Sends and receives between two ranks."""

    device = torch.device("cpu")

    def check_every_dtype_and_size_around_the_ring(self, domain: Domain) -> None:
        for dtype in MOVED:
            for num_bytes in BYTES:
                received = full(num_bytes, dtype, 0, self.device)
                incoming = domain.irecv(received, domain.prev)
                outgoing = domain.isend(full(num_bytes, dtype, 1, self.device), domain.next)
                assert incoming.wait() is received
                assert outgoing.wait() is None
                assert torch.equal(received, torch.ones_like(received)), (num_bytes, dtype)

    def check_ring_deeper_than_the_domain(self, domain: Domain) -> None:
        """Each rank has `slots >= size` sends under way before it takes the first receive: nothing may deadlock."""
        for num_bytes in (2_304, 1 << 20):
            for num_slots in (domain.size, domain.size + 3):
                sent = [full(num_bytes, torch.float32, 100 * domain.rank + s, self.device) for s in range(num_slots)]
                outgoing = [domain.isend(tensor, domain.next) for tensor in sent]
                received = [full(num_bytes, torch.float32, -1, self.device) for _ in range(num_slots)]
                for slot, tensor in enumerate(received):
                    domain.irecv(tensor, domain.prev).wait()
                    assert torch.equal(tensor, torch.full_like(tensor, 100 * domain.prev + slot))
                for request in outgoing:
                    request.wait()

    def check_a_posted_receive_needs_no_attention(self, domain: Domain) -> None:
        """With all receives posted, every rank may wait for its send first."""
        received = full(1 << 20, torch.float32, 0, self.device)
        incoming = domain.irecv(received, domain.prev)
        domain.isend(full(1 << 20, torch.float32, domain.rank + 1, self.device), domain.next).wait()
        incoming.wait()
        assert torch.equal(received, torch.full_like(received, domain.prev + 1))

    def check_tensors_arrive_in_order(self, domain: Domain) -> None:
        sends = [domain.isend(torch.full((4,), float(n), device=self.device), domain.next) for n in range(5)]
        buffers = [torch.empty(4, device=self.device) for _ in range(5)]
        receives = [domain.irecv(buffer, domain.prev) for buffer in buffers]
        for request in (*reversed(receives), *sends):
            request.wait()
        assert [buffer[0].item() for buffer in buffers] == [0, 1, 2, 3, 4]

    def check_messages_arrive_in_order_whichever_is_waited_for_first(self, domain: Domain) -> None:
        messages = [b"", b"one", b"x" * 100_000, b"three"]
        sends = [domain.isend_message(message, domain.next) for message in messages]
        receives = [domain.irecv_message(domain.prev) for _ in messages]
        got = [request.wait() for request in reversed(receives)]
        for send in sends:
            send.wait()
        assert got[::-1] == messages

    def check_messages_and_tensors_do_not_meet(self, domain: Domain) -> None:
        tensor, received = torch.full((3,), 7.0, device=self.device), torch.zeros(3, device=self.device)
        sends = [
            domain.isend_message(b"first", domain.next),
            domain.isend(tensor, domain.next),
            domain.isend_message(b"second", domain.next),
        ]
        domain.irecv(received, domain.prev).wait()
        assert [domain.irecv_message(domain.prev).wait() for _ in range(2)] == [b"first", b"second"]
        for send in sends:
            send.wait()
        assert received.tolist() == [7.0, 7.0, 7.0]

    def check_collectives_and_sends_do_not_meet(self, domain: Domain) -> None:
        received = torch.zeros(3, device=self.device)
        incoming = domain.irecv(received, domain.prev)
        outgoing = domain.isend(torch.full((3,), 5.0, device=self.device), domain.next)
        summed = domain.all_reduce(torch.ones(3, device=self.device))
        incoming.wait()
        outgoing.wait()
        assert summed.tolist() == [domain.size] * 3 and received.tolist() == [5.0] * 3

    def check_test_never_blocks(self, domain: Domain) -> None:
        incoming = domain.irecv_message(domain.prev)
        if domain.size > 1:
            domain.barrier()
            assert not incoming.test() and not incoming.done
        domain.barrier()
        outgoing = domain.isend_message(b"now", domain.next)
        domain.waits.until(incoming.test, lambda: "test")
        assert incoming.done and incoming.wait() == b"now" and incoming.wait() == b"now"
        outgoing.wait()

    def check_an_idle_wait_outlives_the_deadline(self, domain: Domain) -> None:
        if domain.size == 1:
            return
        normal = domain.waits.deadline_s
        if domain.is_first:
            time.sleep(0.2)
            requests = [domain.isend_message(b"late", dst) for dst in range(1, domain.size)]
            for request in requests:
                request.wait()
        else:
            domain.waits.deadline_s = 0.05
            try:
                assert domain.irecv_message(0).wait(idle=True) == b"late"
            finally:
                domain.waits.deadline_s = normal
        domain.barrier()

    def check_objects(self, domain: Domain) -> None:
        for root in {0, domain.size - 1}:
            value = {"rank": domain.rank, "tensor": torch.ones(2)} if domain.rank == root else None
            assert domain.bcast_object(value, root)["rank"] == root
            gathered = domain.gather_object(("from", domain.rank), root)
            assert gathered == ([("from", rank) for rank in range(domain.size)] if domain.rank == root else [])


class PlaceContract:
    """Where a rank stands."""

    def check_place(self, domain: Domain) -> None:
        assert domain.size == len(domain.world_ranks) == len(set(domain.world_ranks))
        assert domain.is_first == (domain.rank == 0) and domain.is_last == (domain.rank == domain.size - 1)
        assert domain.next == (domain.rank + 1) % domain.size and domain.prev == (domain.rank - 1) % domain.size
        everyone = domain.bcast_object(domain.gather_object((domain.rank, domain.world_ranks)))
        assert everyone == [(rank, domain.world_ranks) for rank in range(domain.size)]
        assert f"{domain.name}[{domain.rank}/{domain.size}]" in repr(domain)


class MakingContract:
    """Domains made out of domains."""

    def check_split_of_every_shape(self, domain: Domain) -> None:
        size, rank = domain.size, domain.rank
        shapes: list[list[int | None]] = [
            [0] * size,
            list(range(size)),
            [r % 2 for r in range(size)],
            [r // 2 for r in range(size)],
            [None if r % 2 else 5 for r in range(size)],
            [None] * (size - 1) + [0],
            [None] * size,
        ]
        for colors in shapes:
            for reverse in (False, True):
                child = domain.split(colors[rank], -rank if reverse else rank, name="part")
                mates = [r for r in range(size) if colors[r] == colors[rank]]
                if colors[rank] is None:
                    assert child is None
                    continue
                assert child is not None
                expect_members(child, domain, mates[::-1] if reverse else mates)
                child.close()

    def check_equal_keys_keep_the_order(self, domain: Domain) -> None:
        child = domain.split(0, name="same")
        assert child is not None
        expect_members(child, domain, list(range(domain.size)))
        child.close()

    def check_nested_splits(self, domain: Domain) -> None:
        half = domain.split(domain.rank % 2, -domain.rank, name="half")
        assert half is not None
        quarter = half.split(half.rank % 2, name="quarter")
        assert quarter is not None
        mates = [half.world_ranks[r] for r in range(half.size) if r % 2 == half.rank % 2]
        assert list(quarter.world_ranks) == mates
        assert quarter.all_reduce(torch.ones(1)).item() == len(mates)
        quarter.close()
        half.close()

    def check_domains_do_not_hear_each_other(self, domain: Domain) -> None:
        left, right = domain.split(0, name="left"), domain.split(0, name="right")
        assert left is not None and right is not None
        outgoing = [left.isend_message(b"left", left.next), right.isend_message(b"right", right.next)]
        assert right.irecv_message(right.prev).wait() == b"right"
        assert left.irecv_message(left.prev).wait() == b"left"
        for request in outgoing:
            request.wait()
        right.close()
        left.close()

    def check_overlapping_subsets_with_uneven_histories(self, domain: Domain) -> None:
        """Members alone make a subset; who makes how many others before must not matter."""
        if domain.is_first:
            for _ in range(3):
                domain.subset([0], name="alone").close()
        if domain.size > 1 and domain.rank < 2:
            for _ in range(2):
                pair = domain.subset([1, 0], name="pair", tag=1)
                expect_members(pair, domain, [1, 0])
                pair.close()
        early, late = list(range(max(1, domain.size - 1))), list(range(domain.size - 1, 0, -1)) or [0]
        made = [domain.subset(ranks, name="most", tag=2) for ranks in (early, late) if domain.rank in ranks]
        for child in made:
            assert child.all_reduce(torch.ones(1)).item() == child.size
        whole = domain.subset(range(domain.size), name="whole", tag=3)
        expect_members(whole, domain, list(range(domain.size)))
        for child in (*made, whole):
            child.close()

    def check_disjoint_subsets_at_once(self, domain: Domain) -> None:
        """Groups of torch made so by `new_group` get cross-wired and return wrong sums."""
        pair = [r for r in range(domain.size) if r // 2 == domain.rank // 2]
        for _ in range(5):
            child = domain.subset(pair, name="pair")
            tensor = torch.full((100,), 10.0 ** (domain.rank // 2))
            assert torch.equal(child.all_reduce(tensor), torch.full((100,), len(pair) * 10.0 ** (domain.rank // 2)))
            child.close()

    def check_nested_subsets(self, domain: Domain) -> None:
        reversed_ = domain.subset(range(domain.size - 1, -1, -1), name="reversed")
        most = list(range(max(1, domain.size - 1)))
        if reversed_.rank in most:
            child = reversed_.subset(most, name="child")
            assert child.world_ranks == tuple(reversed(domain.world_ranks))[: len(most)]
            assert child.all_reduce(torch.ones(1)).item() == len(most)
            child.close()
        reversed_.close()

    def check_making_and_closing_again_and_again(self, domain: Domain) -> None:
        for _ in range(100):
            child = domain.split(0, name="again")
            assert child is not None
            child.close()
        assert domain.all_reduce(torch.ones(1)).item() == domain.size


class MisuseContract:
    """Mistakes are errors on the rank that makes them, before anything is sent."""

    def check_a_rank_that_is_not_there(self, domain: Domain) -> None:
        tensor = torch.ones(1)
        for rank in (-1, domain.size):
            for verb in (
                lambda r: domain.isend(tensor, r),
                lambda r: domain.irecv(tensor, r),
                lambda r: domain.isend_message(b"", r),
                lambda r: domain.irecv_message(r),
                lambda r: domain.broadcast(tensor, r),
                lambda r: domain.bcast_object(1, r),
                lambda r: domain.gather_object(1, r),
                lambda r: domain.subset([r], name="x"),
            ):
                with pytest.raises(DomainError, match=f"there is no rank {rank}, ranks are 0 to {domain.size - 1}"):
                    verb(rank)

    def check_not_contiguous(self, domain: Domain) -> None:
        strided = torch.ones(4, 6).t()
        for verb in (domain.all_reduce, domain.broadcast, lambda t: domain.isend(t, 0), lambda t: domain.irecv(t, 0)):
            with pytest.raises(DomainError, match="not contiguous"):
                verb(strided)

    def check_reduce_scatter_of_another_extent(self, domain: Domain) -> None:
        with pytest.raises(DomainError, match=f"the first dim must be {domain.size}"):
            domain.reduce_scatter(torch.ones(domain.size + 1, 3))

    def check_subset_that_is_none(self, domain: Domain) -> None:
        with pytest.raises(DomainError, match="each rank once, and me among them"):
            domain.subset([domain.rank, domain.rank], name="twice")
        if domain.size > 1:
            with pytest.raises(DomainError, match="each rank once, and me among them"):
                domain.subset([domain.next], name="not me")

    def check_use_after_close(self, domain: Domain) -> None:
        child = domain.split(0, name="gone")
        assert child is not None
        with child:
            child.barrier()
        child.close()
        tensor = torch.ones(child.size, 1)
        for verb, call in {
            "barrier": child.barrier,
            "broadcast": lambda: child.broadcast(tensor),
            "all_reduce": lambda: child.all_reduce(tensor),
            "all_gather": lambda: child.all_gather(tensor),
            "reduce_scatter": lambda: child.reduce_scatter(tensor),
            "isend": lambda: child.isend(tensor, 0),
            "irecv": lambda: child.irecv(tensor, 0),
            "isend_message": lambda: child.isend_message(b"", 0),
            "irecv_message": lambda: child.irecv_message(0),
            "split": lambda: child.split(0, name="x"),
            "subset": lambda: child.subset([child.rank], name="x"),
        }.items():
            with pytest.raises(DomainError, match=f"gone.*: {verb} after close"):
                call()


class AccountContract:
    """Each verb counts its calls and bytes, and the last action is known."""

    device = torch.device("cpu")

    def check_calls_and_bytes(self, domain: Domain) -> None:
        before = {verb: (stats.num_calls, stats.num_bytes) for verb, stats in domain.accounts.verbs.items()}
        tensor = torch.ones(576, device=self.device)
        for _ in range(3):
            domain.all_reduce(tensor)
        domain.broadcast(tensor[:10])
        domain.all_gather(tensor[:4])
        domain.reduce_scatter(torch.ones(domain.size, 2, device=self.device))
        incoming = domain.irecv(torch.empty(6, device=self.device), domain.prev)
        outgoing = domain.isend(tensor[:6], domain.next)
        incoming.wait()
        outgoing.wait()
        message = domain.isend_message(b"12345", domain.next)
        domain.irecv_message(domain.prev).wait()
        message.wait()
        domain.barrier()
        assert domain.accounts.last_action == "barrier"
        expected = {
            "all_reduce": (3, 3 * 2_304),
            "broadcast": (1, 40),
            "all_gather": (1, 16 * domain.size),
            "reduce_scatter": (1, 8 * domain.size),
            "isend": (1, 24),
            "irecv": (1, 24),
            "isend_message": (1, 5),
            "irecv_message": (1, 0),
            "barrier": (1, 0),
        }
        for verb, (num_calls, num_bytes) in expected.items():
            calls_before, bytes_before = before.get(verb, (0, 0))
            stats = domain.accounts.verbs[verb]
            assert (stats.num_calls - calls_before, stats.num_bytes - bytes_before) == (num_calls, num_bytes), verb

    def check_waiting_is_timed(self, domain: Domain) -> None:
        """Against the clocks of both ranks, never a fixed time: a busy machine may wake either of them late."""
        domain.barrier()
        before_s = domain.accounts.wait_s
        if domain.is_last:
            time.sleep(0.3)
        came = time.time()
        domain.all_reduce(torch.ones(1, device=self.device))
        elapsed_s = time.time() - came
        waited_s = domain.accounts.wait_s - before_s
        assert waited_s <= elapsed_s + 1e-3
        last_came = domain.bcast_object(came, domain.size - 1)
        assert waited_s >= 0.1 * (last_came - came) - 1e-3


class AgreeContract:
    """A user's mistake that one rank finds is the same error on every rank."""

    def check_on_first(self, domain: Domain) -> None:
        calls: list[int] = []
        assert on_first(domain, lambda: calls.append(1) or "answer") == "answer"
        assert len(calls) == domain.is_first

        def refuse() -> None:
            raise LayoutError("layout.toml: [parallel] tensor = 0: must be 1 or more")

        with pytest.raises(LayoutError, match="tensor = 0"):
            on_first(domain, refuse)

    def check_on_all_returns_each_its_own(self, domain: Domain) -> None:
        assert on_all(domain, lambda: domain.rank) == domain.rank

    def check_an_error_on_one_rank_only(self, domain: Domain) -> None:
        for guilty in range(domain.size):

            def work(guilty: int = guilty) -> None:
                if domain.rank == guilty:
                    raise UsageError(f"found by {guilty}")

            with pytest.raises(UsageError, match=f"^found by {guilty}$"):
                on_all(domain, work)

    def check_the_lowest_rank_speaks(self, domain: Domain) -> None:
        def work() -> None:
            if domain.rank or domain.size == 1:
                raise UsageError(f"found by {domain.rank}")

        with pytest.raises(UsageError, match=f"^found by {min(1, domain.size - 1)}$"):
            on_all(domain, work)

    def check_same_on_all(self, domain: Domain) -> None:
        same_on_all(domain, "equal", lambda values: UsageError(f"{values}"))
        if domain.size == 1:
            return
        value = "odd" if domain.is_last else "equal"
        with pytest.raises(UsageError, match="'odd'"):
            same_on_all(domain, value, lambda values: UsageError(f"{values}"))


class FailureContract:
    """What ends a wait. Each check gets a domain to itself, of two ranks or more, and uses it up."""

    DEADLINE_S = 0.4

    def check_a_collective_past_its_deadline(self, domain: Domain) -> None:
        self.expect_deadline(domain, "all_reduce", lambda: domain.all_reduce(torch.ones(8)))

    def check_a_barrier_past_its_deadline(self, domain: Domain) -> None:
        self.expect_deadline(domain, "barrier", domain.barrier)

    def check_a_receive_past_its_deadline(self, domain: Domain) -> None:
        last = domain.size - 1
        self.expect_deadline(domain, "irecv", lambda: domain.irecv(torch.ones(8), last).wait())

    def check_a_message_past_its_deadline(self, domain: Domain) -> None:
        last = domain.size - 1
        self.expect_deadline(domain, "irecv_message", lambda: domain.irecv_message(last).wait())

    def check_a_split_past_its_deadline(self, domain: Domain) -> None:
        self.expect_deadline(domain, "split", lambda: domain.split(0, name="never"))

    def expect_deadline(self, domain: Domain, verb: str, wait: Callable[[], object]) -> None:
        """The last rank does not come. One waiting rank gives up first, and tells all the others."""
        self.be_impatient(domain)
        start = time.monotonic()
        if domain.is_last:
            cause = await_abort(domain)
        else:
            with pytest.raises((DeadlineError, AbortedError)) as caught:
                wait()
            cause = str(caught.value)
            # A rank that came late hears at once that another has given up.
            assert isinstance(caught.value, AbortedError) or time.monotonic() - start >= self.DEADLINE_S
        assert f": {verb} waited" in cause and "deadline" in cause, cause
        assert time.monotonic() - start < self.DEADLINE_S + 10
        self.expect_quarantine(domain)

    def be_impatient(self, domain: Domain) -> None:
        """Only from here on: a busy machine may start the ranks further apart than the deadline."""
        domain.barrier()
        domain.waits.deadline_s = self.DEADLINE_S

    def expect_quarantine(self, domain: Domain) -> None:
        start = time.monotonic()
        domain.close()
        assert time.monotonic() - start < 5
        assert domain in domain.waits.quarantine
        with pytest.raises(DomainError, match="after close"):
            domain.barrier()

    def check_waiting_ranks_see_an_abort(self, domain: Domain) -> None:
        if domain.is_last:
            domain.waits.abort.post("rank 7: the weights are gone")
        else:
            with pytest.raises(AbortedError, match="rank 7: the weights are gone"):
                domain.barrier()
        self.expect_quarantine(domain)

    def check_idle_ranks_see_an_abort(self, domain: Domain) -> None:
        if domain.is_last:
            domain.waits.abort.post("out of memory")
        else:
            with pytest.raises(AbortedError, match="out of memory"):
                domain.irecv_message(domain.size - 1).wait(idle=True)
        self.expect_quarantine(domain)

    def check_a_bug_on_one_rank_ends_an_agreement(self, domain: Domain) -> None:
        """Not a user's mistake: it keeps its traceback where it happened, and nobody waits for that rank."""

        def work() -> None:
            if domain.is_last:
                raise ZeroDivisionError("a bug")

        expected = ZeroDivisionError if domain.is_last else AbortedError
        with pytest.raises(expected, match="a bug"):
            on_all(domain, work)
        self.expect_quarantine(domain)

    def check_a_failed_wait_inside_an_agreement_ends_it(self, domain: Domain) -> None:
        self.be_impatient(domain)
        if domain.is_last:
            assert "all_reduce waited" in await_abort(domain)
        else:
            with pytest.raises(DomainError, match="all_reduce waited"):
                on_all(domain, lambda: domain.all_reduce(torch.ones(1)))
        self.expect_quarantine(domain)


# What a host domain promises, and what one with a device plane does.
PLANE_CONTRACTS = (
    *(PlaceContract, CollectiveContract, StagedSumContract, NeighbourContract, MisuseContract, AccountContract),
)
HOST_CONTRACTS = (*PLANE_CONTRACTS, MakingContract, AgreeContract)
