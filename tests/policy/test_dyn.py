"""The default controller keeps the throughput of SSP(upper) at the gap of the smallest threshold that can have it."""

from __future__ import annotations

import functools

import pytest

from stalempi.policy import DSSP, SSP, Policy

from .timing import SCENARIOS, Outcome, outcome, scenario
from .watched import Watch

LOWER, UPPER, UNTIL = 3, 15, 2000.0


@functools.cache
def measured(name: str, threshold: int | None) -> Outcome:
    """Runs SSP(threshold), or DSSP where there is none, with the same random streams."""
    policy: Policy = DSSP(LOWER, UPPER) if threshold is None else SSP(threshold)
    service = scenario(name, SCENARIOS[name], seed=1, until=UNTIL)
    return outcome(policy, SCENARIOS[name], service, until=UNTIL)


@pytest.mark.parametrize("name", SCENARIOS)
def test_throughput_is_at_least_98_percent_of_the_widest_ssp(name: str) -> None:
    assert measured(name, None).throughput >= 0.98 * measured(name, UPPER).throughput


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_gap_is_above_upper_plus_1_at_a_push(name: str) -> None:
    assert measured(name, None).max_gap <= UPPER + 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_fixed_threshold_is_better_on_both_axes_by_more_than_2_percent(name: str) -> None:
    dyn = measured(name, None)
    fixed = [measured(name, threshold) for threshold in range(LOWER, UPPER + 1)]
    assert not [one for one in fixed if one.throughput > 1.02 * dyn.throughput and one.mean_gap < 0.98 * dyn.mean_gap]


@pytest.mark.parametrize("name", ["homogeneous", "straggler", "pair", "mixed"])
def test_where_slack_buys_nothing_the_threshold_stays_at_lower(name: str) -> None:
    assert measured(name, None) == measured(name, LOWER)


@pytest.mark.parametrize("name", ["stalls", "rotating", "dies"])
def test_where_slack_hides_slowness_it_is_used(name: str) -> None:
    assert measured(name, None).throughput > 1.05 * measured(name, LOWER).throughput


def test_a_worker_stops_where_the_least_count_is_about_to_rise(watch: Watch) -> None:
    """Worker 1 takes 10 s an iteration and is next due at 20; worker 0 takes 1 s and would wait for 0.1 s."""
    run = watch(DSSP(0, 20, controller="moment", predictor="last", eps=0.1), 2)
    run.push(0, at=10.0)
    run.push(1, at=10.0)
    assert all(run.goes_on(0, at=float(now)) for now in range(11, 20))
    assert not run.goes_on(0, at=19.95)


def test_a_stalled_worker_is_not_waited_for_as_if_it_were_about_to_push(watch: Watch) -> None:
    run = watch(DSSP(0, 20, controller="moment", predictor="last"), 2)
    run.push(0, at=1.0)
    run.push(1, at=1.0)
    assert run.goes_on(0, at=2.5)
    assert run.goes_on(0, at=3.5)


def test_dyn_begins_at_lower(watch: Watch) -> None:
    run = watch(DSSP(1, 5), 2)
    assert [run.goes_on(0), run.goes_on(0)] == [True, False]


@pytest.mark.parametrize("controller", ["dyn", "moment"])
def test_the_same_events_give_the_same_decisions(controller: str) -> None:
    """Law 1: a policy holds no clock and no chance, so two runs of it are one."""

    def run(policy: Policy) -> Outcome:
        return outcome(policy, 4, scenario("stalls", 4, seed=3, until=200.0), until=200.0)

    policy = DSSP(1, 6, controller=controller)
    assert run(policy) == run(policy) == run(DSSP(1, 6, controller=controller))
