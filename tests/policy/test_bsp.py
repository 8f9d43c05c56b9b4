"""BSP makes one update per round, from all workers, or from N of N + c with backup workers."""

from __future__ import annotations

import pytest

from stalempi.errors import ConfigError
from stalempi.policy import ASP, BSP, Apply, Drop, Leave, Push, Release

from .watched import Watch


def test_the_last_push_of_a_round_applies_all_and_releases_all(watch: Watch) -> None:
    run = watch(BSP(), 3)
    assert run.push(2) == []
    assert run.push(0) == []
    assert run.push(1) == [Apply((0, 1, 2)), Release(0), Release(1), Release(2)]


def test_a_leave_completes_the_round_of_those_who_wait(watch: Watch) -> None:
    run = watch(BSP(), 3)
    run.push(0)
    run.push(2)
    assert run.leave(1) == [Apply((0, 2)), Release(0), Release(2)]


def test_the_gradient_of_a_worker_lost_while_it_waits_is_applied_with_its_round(watch: Watch) -> None:
    run = watch(BSP(), 3)
    run.push(0)
    assert run.leave(0) == []
    run.push(1)
    assert run.push(2) == [Apply((0, 1, 2)), Release(1), Release(2)]


def test_the_last_gradient_is_applied_even_when_nobody_is_left(watch: Watch) -> None:
    run = watch(BSP(), 2)
    run.push(0)
    run.leave(0)
    assert run.leave(1) == [Apply((0,))]


def test_a_leave_between_rounds_makes_no_update(watch: Watch) -> None:
    run = watch(BSP(), 2)
    assert run.leave(0) == []
    assert run.push(1) == [Apply((1,)), Release(1)]


def test_with_a_backup_worker_the_round_goes_on_without_the_last(watch: Watch) -> None:
    run = watch(BSP(backup=1), 3, drops=True)
    run.push(0)
    assert run.push(2) == [Apply((0, 2)), Release(0), Release(2)]


def test_a_late_gradient_is_dropped_and_its_worker_joins_the_current_round(watch: Watch) -> None:
    run = watch(BSP(backup=1), 3, drops=True)
    run.push(0)
    run.push(2)
    assert run.push(1) == [Drop(1), Release(1)]
    run.push(1)
    assert run.push(0) == [Apply((0, 1)), Release(0), Release(1)]


def test_a_worker_that_leaves_uses_up_a_backup_and_the_round_keeps_its_size(watch: Watch) -> None:
    run = watch(BSP(backup=1), 3, drops=True)
    run.leave(1)
    assert run.push(0) == []
    assert run.push(2) == [Apply((0, 2)), Release(0), Release(2)]


def test_with_fewer_left_than_a_round_needs_the_round_is_of_those_left(watch: Watch) -> None:
    run = watch(BSP(backup=1), 4, drops=True)
    run.leave(1)
    run.leave(3)
    run.push(0)
    assert run.push(2) == [Apply((0, 2)), Release(0), Release(2)]


def test_a_group_without_a_full_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="backup=2 needs at least 3 workers, got 2"):
        BSP(backup=2).start(2, 0.0)


def test_bsp_is_bounded_and_bsp_with_backups_and_asp_are_not() -> None:
    assert (BSP().bound, BSP(backup=1).bound, ASP().bound) == (0, None, None)


def test_a_second_push_without_a_release_is_refused(watch: Watch) -> None:
    run = watch(BSP(), 2)
    run.push(0)
    run.refuses(Push(0, 2.0))


@pytest.mark.parametrize("event", [Push(1, 2.0), Leave(1, 2.0), Push(7, 2.0), Leave(-1, 2.0)])
def test_nothing_is_taken_from_a_worker_that_has_left_or_never_was(watch: Watch, event: Push | Leave) -> None:
    run = watch(BSP(), 2)
    run.leave(1)
    run.refuses(event)


def test_a_policy_starts_afresh(watch: Watch) -> None:
    policy = BSP()
    policy.start(2, 0.0)
    policy.on_push(Push(0, 1.0))
    run = watch(policy, 2)
    assert run.push(1) == []
    assert run.push(0) == [Apply((0, 1)), Release(0), Release(1)]


def test_asp_updates_and_releases_on_every_push(watch: Watch) -> None:
    run = watch(ASP(), 2)
    for _ in range(5):
        assert run.push(0) == [Apply((0,)), Release(0)]
    assert run.leave(1) == []
