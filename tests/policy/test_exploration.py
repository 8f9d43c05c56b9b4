"""Every interleaving of pushes, releases, leaves and losses of 1 to 4 workers keeps laws 2 to 4; nobody is stuck."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import pytest

from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Continue, Decision, Leave, Policy, Push, Release
from stalempi.policy.ssp import Gated

from .explore import BrokenLawError, Limits, Moments, explore
from .referee import LawError, MayWait, Referee, law


def never(referee: Referee, worker: int) -> bool:
    return False


def others_run(referee: Referee, worker: int) -> bool:
    return bool(referee.running)


def above_0(referee: Referee, worker: int) -> bool:
    return referee.gap(worker) > 0


def above_1(referee: Referee, worker: int) -> bool:
    return referee.gap(worker) > 1


def above_2(referee: Referee, worker: int) -> bool:
    return referee.gap(worker) > 2


sizes = pytest.mark.parametrize("num_workers", [1, 2, 3, 4])


@sizes
def test_bsp(num_workers: int) -> None:
    survey = explore(BSP(), Referee(num_workers, 0, may_wait=others_run), Limits(pushes=3))
    assert survey.states >= 3**num_workers


@sizes
@pytest.mark.parametrize("backup", [1, 2])
def test_bsp_with_backup_workers(num_workers: int, backup: int) -> None:
    if backup < num_workers:
        explore(BSP(backup=backup), Referee(num_workers, None, drops=True, may_wait=others_run), Limits(pushes=3))


@sizes
def test_asp(num_workers: int) -> None:
    survey = explore(ASP(), Referee(num_workers, None, may_wait=never), Limits(pushes=3))
    assert survey.states >= 4**num_workers


@sizes
@pytest.mark.parametrize(("bound", "may_wait"), [(0, above_0), (1, above_1), (2, above_2)])
def test_ssp_holds_a_worker_if_and_only_if_its_gap_is_above_the_bound(
    num_workers: int, bound: int, may_wait: MayWait
) -> None:
    explore(SSP(bound), Referee(num_workers, bound, may_wait=may_wait), Limits(pushes=bound + 3))


@sizes
@pytest.mark.parametrize(("bound", "may_wait"), [(1, above_0), (2, above_1)])
def test_whoever_runs_ahead_is_held_as_if_the_iteration_begun_early_were_over(
    num_workers: int, bound: int, may_wait: MayWait
) -> None:
    """A release of push c is leave for iteration c + 1, so c + 1 - m <= bound: the laws of the bound below hold."""
    policy = SSP(bound)
    policy.let_run_ahead()
    explore(policy, Referee(num_workers, bound - 1, may_wait=may_wait), Limits(pushes=bound + 2))


class CopyReferee(Referee):
    """Also keeps what each worker's copy contains: how many updates of each worker, always the first so many."""

    def __init__(self, num_workers: int, bound: int) -> None:
        super().__init__(num_workers, bound, may_wait=(above_0, above_1, above_2)[bound])
        self.slack = bound
        self.copies = [[0] * num_workers for _ in range(num_workers)]

    def _leave(self, event: Leave) -> None:
        super()._leave(event)
        # What it held and what it wrote matters to no law any more; forgetting it lets histories meet.
        self.copies[event.worker] = [0] * len(self.copies)
        for copy in self.copies:
            copy[event.worker] = 0

    def _go_on(self, decision: Release | Continue) -> None:
        super()._go_on(decision)
        worker, copy = decision.worker, self.copies[decision.worker]
        if isinstance(decision, Release):
            copy[:] = [used if other in self.members else 0 for other, used in enumerate(self.used)]
        else:
            copy[worker] += 1
        clock = self.counts[worker]
        law(copy[worker] == clock, f"worker {worker} does not read its own writes")
        oldest = min(copy[other] for other in self.members)
        law(oldest >= clock - self.slack, f"worker {worker} at clock {clock} has a copy with {copy}")


@pytest.mark.parametrize(("num_workers", "bound"), [(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1), (3, 1), (2, 2)])
def test_cached_pulls_keep_the_clock_guarantees(num_workers: int, bound: int) -> None:
    """At clock c a copy has all updates numbered c - s - 1 or less (so c - s of them), and all of the worker's own."""
    explore(CachedSSP(bound), CopyReferee(num_workers, bound), Limits(pushes=bound + 3))


@pytest.mark.parametrize(("pushes", "leaves"), [(3, True), (4, False)])
def test_cached_pulls_of_four_workers(pushes: int, leaves: bool) -> None:
    """Both at once, leaves and bound + 3 pushes, is 460,000 transitions: walked by hand (15 s), and clean."""
    explore(CachedSSP(1), CopyReferee(4, 1), Limits(pushes=pushes, leaves=leaves))


class AnyThreshold(Gated):
    """A controller without reason: the explorer names the threshold of each push, in the place of the time."""

    name: ClassVar[str] = "any"

    def options(self) -> dict[str, int | float | str]:
        return {}

    def _threshold(self, event: Push) -> int:
        return int(event.now)


def between(lower: int, upper: int) -> Moments:
    """Gives all thresholds in [lower, upper]."""
    return lambda now: map(float, range(lower, upper + 1))


@pytest.mark.parametrize(
    ("num_workers", "lower", "upper"), [(1, 0, 1), (2, 0, 2), (2, 1, 3), (3, 0, 2), (3, 1, 2), (4, 0, 1)]
)
def test_whatever_a_controller_chooses_in_lower_to_upper_the_laws_hold(
    num_workers: int, lower: int, upper: int
) -> None:
    """So a capped DSSP is right if its controller keeps to [lower, upper], whatever it predicts."""
    referee = Referee(num_workers, upper, may_wait=above_1 if lower else above_0)
    explore(AnyThreshold(), referee, Limits(pushes=upper + 3, moments=between(lower, upper)))


def soon_or_late(now: float) -> Iterable[float]:
    return (now + 1.0, now + 4.0)


@pytest.mark.parametrize(("num_workers", "events"), [(1, 5), (2, 7), (3, 5), (4, 4)])
@pytest.mark.parametrize("controller", ["dyn", "moment", "paper-capped"])
def test_dssp_at_short_and_long_intervals(controller: str, num_workers: int, events: int) -> None:
    policy = DSSP(0, 1, controller=controller)
    explore(policy, Referee(num_workers, 1, may_wait=above_0), Limits(pushes=4, events=events, moments=soon_or_late))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_dssp_that_narrows(num_workers: int) -> None:
    policy = DSSP(0, 2, controller="paper-capped", narrow=(2, 5))
    limits = Limits(pushes=5, events=11 - 2 * num_workers, moments=soon_or_late)
    explore(policy, Referee(num_workers, 2, may_wait=above_0), limits)


class Forgetful(SSP):
    """Wrong on purpose: it does not let those go who waited for a worker that has left."""

    def _left(self, event: Leave) -> list[Decision]:
        self._gate.discard(event.worker)
        return []


class Hasty(BSP):
    """Wrong on purpose: it throws away the gradient of a worker that is lost while it waits."""

    def _left(self, event: Leave) -> list[Decision]:
        decisions = super()._left(event)
        if event.worker in self._gathered:
            self._gathered.remove(event.worker)
        return decisions


@pytest.mark.parametrize(
    ("policy", "bound", "broken_law"),
    [(Forgetful(0), 0, "liveness"), (Hasty(), 0, "law 4"), (SSP(1), 0, "law 2")],
)
def test_the_explorer_finds_what_is_wrong(policy: Policy, bound: int, broken_law: str) -> None:
    with pytest.raises(BrokenLawError, match=broken_law) as broken:
        explore(policy, Referee(2, bound), Limits(pushes=3))
    assert isinstance(broken.value, LawError)
    assert len(broken.value.history) <= 3
