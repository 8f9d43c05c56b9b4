"""The paper's controllers follow Algorithms 1 and 2; uncapped they have no bound, and a smallest history shows it."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.policy import DSSP, Clocks, UnboundedGapWarning
from stalempi.policy.paper import PaperController, best_credit

from .explore import BrokenLawError, History, Limits, explore
from .referee import Referee
from .timing import outcome, scenario
from .watched import Watch

unbounded = pytest.mark.filterwarnings("ignore::stalempi.policy.UnboundedGapWarning")


def test_figure_2_of_the_paper_grants_three() -> None:
    """Slow pushes at 10 and 20 of the slow worker's clock lie nearest to p's third extra push (r_max = 4)."""
    assert best_credit(4.0, 2.0, 10.0, 10.0, r_max=4) == 3


def test_line_8_leaves_ties_open_and_the_smallest_credit_wins() -> None:
    assert best_credit(0.0, 1.0, 0.5, 100.0, r_max=4) == 0


seconds = st.integers(1, 40).map(lambda eighths: eighths / 8)


@given(last=seconds, interval=seconds, following=seconds, slow=seconds, r_max=st.integers(0, 12))
def test_the_credit_is_the_best_of_all_pairs(
    last: float, interval: float, following: float, slow: float, r_max: int
) -> None:
    """Times are whole eighths, so that the plain double loop meets the same ties exactly."""
    pairs = ((r, k) for r in range(r_max + 1) for k in range(r_max + 1))
    expected = min(pairs, key=lambda pair: abs(following + pair[1] * slow - (last + pair[0] * interval)))[0]
    assert best_credit(last, interval, following, slow, r_max=r_max) == expected


@unbounded
def test_without_two_pushes_of_both_there_is_no_interval_and_no_credit(watch: Watch) -> None:
    run = watch(DSSP(1, 5, controller="paper"), 2)
    assert run.goes_on(0, at=1.0)
    assert not run.goes_on(0, at=2.0)


@unbounded
def test_only_the_fastest_worker_is_given_credit(watch: Watch) -> None:
    """Lines 11-12: workers 0 and 1 are both above s_L = 0, but only 0 has pushed most."""
    run = watch(DSSP(0, 4, controller="paper"), 3)
    for worker, now in ((0, 1.0), (1, 1.0), (2, 2.0), (0, 3.0), (1, 19.0), (2, 20.0)):
        run.push(worker, now)
    assert run.goes_on(0, at=21.0)
    assert run.goes_on(0, at=22.0)
    assert not run.goes_on(1, at=23.0)


@unbounded
def test_a_grant_of_r_gives_r_plus_1_iterations_as_printed_and_r_when_capped(watch: Watch) -> None:
    """Line 14 sends OK and leaves r_p as it is; capped, that OK is the first of the r (papers.md 1.4 item 2).

    At 27 s worker 0 (interval 2) is 4 ahead of worker 1, which is to push at 33: r* = 3, hit exactly.
    """
    extra = {}
    for controller in ("paper", "paper-capped"):
        run = watch(DSSP(3, 6, controller=controller), 2)
        for worker, now in ((0, 2.0), (1, 7.0), (0, 19.0), (1, 20.0), (0, 21.0), (0, 23.0), (0, 25.0)):
            run.push(worker, now)
        extra[controller] = 0
        while run.goes_on(0, at=27.0 + 2.0 * extra[controller]):
            extra[controller] += 1
    assert extra == {"paper": 4, "paper-capped": 3}


def test_the_uncapped_controller_warns_once_that_the_gap_has_no_bound() -> None:
    policy = DSSP(1, 3, controller="paper")
    assert policy.bound is None
    with pytest.warns(UnboundedGapWarning, match="no bound on the gap"):
        policy.start(2, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.start(2, 0.0)
        DSSP(1, 3, controller="paper-capped").start(2, 0.0)


def drawn(history: History, num_workers: int) -> list[str]:
    """Draws a history one line a worker, one column a push: the count of pushes where the worker pushes."""
    counts = [0] * num_workers
    lines = [f"worker {worker} " for worker in range(num_workers)]
    for event in history:
        counts[event.worker] += 1
        for worker in range(num_workers):
            lines[worker] += f" {counts[worker] if worker == event.worker else '.'}"
    return lines


@unbounded
def test_the_smallest_history_in_which_the_paper_breaks_its_own_upper_threshold() -> None:
    """s_L = 0, s_U = 1, two workers, one push a second: six pushes are enough.

    At its third push worker 1 (gap 1 > s_L, fastest) gets credit r* = 1. Line 14 sends OK without spending it, so line
    5 sends OK again at the fourth push, where the gap is 2: it starts an iteration at a gap above s_U.
    """
    referee = Referee(2, bound=1)
    limits = Limits(pushes=8, leaves=False, moments=lambda now: (now + 1.0,))
    with pytest.raises(BrokenLawError, match="worker 1 starts at a gap of 2 under bound 1") as broken:
        explore(DSSP(0, 1, controller="paper"), referee, limits)
    assert drawn(broken.value.history, 2) == [
        "worker 0  1 . . 2 . .",
        "worker 1  . 1 2 . 3 4",
    ]


@unbounded
def test_next_to_a_slower_worker_the_paper_passes_its_upper_threshold_many_times_over_and_capped_never() -> None:
    """The paper's own pair, 1 : 1.9 (papers.md 1.8: at most 15 under the cap, 263 without)."""
    gaps = {}
    for controller in ("paper", "paper-capped"):
        service = scenario("pair", 2, seed=0, until=500.0)
        gaps[controller] = outcome(DSSP(3, 15, controller=controller), 2, service, until=500.0).max_gap
    assert gaps["paper"] > 100
    assert gaps["paper-capped"] <= 16


@unbounded
@given(history=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11)), max_size=60))
def test_the_slowest_is_the_one_of_least_count_that_pushed_longest_ago(history: list[tuple[int, int]]) -> None:
    """Line 3 of Algorithm 2 by a plain walk; every worker goes on at once, and leaves at 0."""
    clocks, controller = Clocks(5), PaperController(1, 3)
    controller.start(clocks, 0.0)
    pushed = [0.0] * 5
    for now, (worker, leave) in enumerate(history, start=1):
        if not clocks.is_active(worker) or (leave == 0 and clocks.num_active == 1):
            continue
        if leave == 0:
            clocks.leave(worker)
            continue
        clocks.push(worker)
        controller.threshold(worker, float(now))
        pushed[worker] = float(now)
        least = [other for other in clocks.workers() if clocks.counts[other] == clocks.least]
        assert controller._slowest() == min(least, key=lambda other: (pushed[other], other))
