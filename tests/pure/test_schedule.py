"""The schedule checker: agrees with what MPI does, and finds what is wrong in a wrong schedule."""

from __future__ import annotations

import pytest

from mpiinfer.pipeline.schedule import Action, Kind, Schedule, ScheduleError, bubble_fraction, check, grid, ring

SIZES = [(stages, slots) for stages in range(1, 7) for slots in range(1, 9)]


@pytest.mark.parametrize(("stages", "slots"), SIZES)
def test_a_ring_runs_with_posted_sends(stages: int, slots: int) -> None:
    check(ring(stages, slots), num_rounds=5)


@pytest.mark.parametrize(("stages", "slots"), SIZES)
def test_a_ring_deadlocks_with_synchronous_sends_exactly_when_it_is_full(stages: int, slots: int) -> None:
    if slots < stages:
        check(ring(stages, slots), sends="synchronous")
    else:
        with pytest.raises(ScheduleError, match="cannot go on"):
            check(ring(stages, slots), sends="synchronous")


@pytest.mark.parametrize(("stages", "slots"), SIZES)
def test_full_rings_have_no_bubbles_but_the_ramp(stages: int, slots: int) -> None:
    """With slots >= stages only the first and last stages - 1 units are idle; with fewer, slots of stages work."""
    rounds = 6
    if slots >= stages:
        busy = rounds * slots
        assert bubble_fraction(ring(stages, slots), rounds) == pytest.approx((stages - 1) / (busy + stages - 1))
    else:
        assert bubble_fraction(ring(stages, slots), 200) == pytest.approx(1 - slots / stages, abs=0.01)


def _swapped(schedule: Schedule, stage: int, first: int, second: int) -> Schedule:
    actions = list(schedule.rounds[stage])
    actions[first], actions[second] = actions[second], actions[first]
    rounds = list(schedule.rounds)
    rounds[stage] = tuple(actions)
    return Schedule(schedule.num_slots, tuple(rounds))


def test_receives_in_another_order_than_sends_are_found() -> None:
    schedule = ring(2, 2)
    receives = [i for i, action in enumerate(schedule.rounds[1]) if action.kind is Kind.RECEIVE]
    with pytest.raises(ScheduleError, match="R1 meets the send of slot 0"):
        check(_swapped(schedule, 1, *receives))


def test_a_missing_receive_is_found() -> None:
    schedule = ring(2, 1)
    deaf = tuple(action for action in schedule.rounds[1] if action.kind is not Kind.RECEIVE)
    with pytest.raises(ScheduleError):
        check(Schedule(1, (schedule.rounds[0], deaf)))


def test_a_receive_without_a_send_is_found() -> None:
    schedule = ring(2, 1)
    mute = tuple(action for action in schedule.rounds[0] if action.kind is not Kind.SEND)
    with pytest.raises(ScheduleError, match="stage 1 in R0"):
        check(Schedule(1, (mute, schedule.rounds[1])))


def test_plans_heard_in_another_order_are_found() -> None:
    schedule = ring(2, 2)
    other = (*schedule.rounds[1][4:], *schedule.rounds[1][:4])
    with pytest.raises(ScheduleError, match="plans slot 1"):
        check(Schedule(2, (schedule.rounds[0], other)))


def test_grid_shows_who_is_busy_when() -> None:
    assert grid(ring(2, 2), num_rounds=1).splitlines() == ["stage 0  F0 F1 ..", "stage 1  .. F0 F1"]
    assert grid(ring(2, 1), num_rounds=2).splitlines() == ["stage 0  F0 .. F0 ..", "stage 1  .. F0 .. F0"]
    assert str(Action(Kind.FORWARD, 3)) == "F3"
