"""SSP holds a worker while its gap is above the bound; with cached pulls it also says when a copy is fresh enough."""

from __future__ import annotations

import pytest

from stalempi.policy import SSP, Apply, CachedSSP, Continue, Leave, Policy, Push, Release

from .watched import Watch


def test_a_worker_starts_at_a_gap_of_the_bound_and_waits_at_one_more(watch: Watch) -> None:
    run = watch(SSP(2), 2)
    assert run.push(0) == [Apply((0,)), Release(0)]
    assert run.push(0) == [Apply((0,)), Release(0)]
    assert run.push(0) == [Apply((0,))]


def test_the_push_that_raises_the_least_count_releases_the_pusher_first_and_then_the_others(watch: Watch) -> None:
    run = watch(SSP(0), 4)
    for worker in (3, 0, 1):
        assert run.push(worker) == [Apply((worker,))]
    assert run.push(2) == [Apply((2,)), Release(2), Release(0), Release(1), Release(3)]


def test_only_those_are_released_whose_gap_is_within_the_bound(watch: Watch) -> None:
    run = watch(SSP(1), 3)
    for worker in (0, 0, 1, 1):
        run.push(worker)
    run.push(2)
    run.push(0)
    assert run.push(2) == [Apply((2,)), Release(2), Release(0)]


def test_a_leave_releases_those_who_waited_for_it(watch: Watch) -> None:
    run = watch(SSP(1), 3)
    for worker in (0, 0, 1, 1):
        run.push(worker)
    assert run.leave(2) == [Release(0), Release(1)]


def test_a_worker_lost_while_it_waits_is_not_released_later(watch: Watch) -> None:
    run = watch(SSP(0), 3)
    run.push(0)
    assert run.leave(0) == []
    run.push(1)
    assert run.push(2) == [Apply((2,)), Release(2), Release(1)]


@pytest.mark.parametrize("policy", [SSP(0), CachedSSP(0)])
def test_a_worker_that_waits_cannot_push(watch: Watch, policy: Policy) -> None:
    run = watch(policy, 2)
    run.push(0)
    run.refuses(Push(0, 2.0))
    run.leave(0)
    run.refuses(Leave(0, 3.0))


def test_with_cached_pulls_a_copy_serves_for_as_many_iterations_as_the_bound(watch: Watch) -> None:
    run = watch(CachedSSP(2), 2)
    assert run.push(0) == [Apply((0,)), Continue(0)]
    assert run.push(1) == [Apply((1,)), Continue(1)]
    assert run.push(0) == [Apply((0,)), Continue(0)]
    assert run.push(1) == [Apply((1,)), Continue(1)]
    assert run.push(0) == [Apply((0,)), Release(0)]


def test_with_cached_pulls_a_worker_too_far_ahead_waits_and_then_gets_fresh_parameters(watch: Watch) -> None:
    run = watch(CachedSSP(1), 2)
    assert run.push(0) == [Apply((0,)), Continue(0)]
    assert run.push(0) == [Apply((0,))]
    assert run.push(1) == [Apply((1,)), Continue(1), Release(0)]


def test_cached_pulls_with_bound_0_are_plain_ssp_0(watch: Watch) -> None:
    cached, plain = watch(CachedSSP(0), 3), watch(SSP(0), 3)
    for worker in (0, 2, 1, 1, 0, 2):
        assert cached.push(worker) == plain.push(worker)


def test_cached_pulls_at_bound_3_save_three_releases_of_four(watch: Watch) -> None:
    """Two of three to worker 0, whose copy is one push older as it always pushes first."""
    run = watch(CachedSSP(3), 2)
    decisions = [decision for _ in range(120) for worker in (0, 1) for decision in run.push(worker)]
    released = [decision.worker for decision in decisions if isinstance(decision, Release)]
    assert (released.count(0), released.count(1)) == ((120 - 1) // 3, 120 // 4)
