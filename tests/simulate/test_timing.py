"""The timing-only simulator gives the times of the theory, worker by worker, and the books of a real run."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalempi.errors import ConfigError
from stalempi.policy import ASP, BSP, DSSP, SSP, Leave, Push
from stalempi.simulate.figures import Figures
from stalempi.simulate.network import Network
from stalempi.simulate.timing import Limit, simulate
from stalempi.simulate.workload import Loss, Workload, listed

from .runs import CAPPED, NETWORK, POLICIES, stalls, steady, traced


def ssp_times(services: list[list[float]], bound: int) -> list[list[float]]:
    """Returns the push times of SSP(s) by its recurrence: T(p, k) = max(T(p, k-1), M(k-1-s)) + S(p, k)."""
    times: list[list[float]] = [[] for _ in services]
    rises = [0.0]
    for k in range(len(services[0])):
        gate = rises[max(0, k - bound)]
        for own, row in zip(times, services, strict=True):
            own.append(max(own[-1] if own else 0.0, gate) + row[k])
        rises.append(max(own[-1] for own in times))
    return times


tables = st.integers(1, 4).flatmap(
    lambda workers: st.integers(1, 12).flatmap(
        lambda rows: st.lists(
            st.lists(st.integers(1, 20).map(float), min_size=rows, max_size=rows), min_size=workers, max_size=workers
        )
    )
)


@settings(max_examples=100, deadline=None)
@given(tables, st.integers(0, 4))
def test_ssp_pushes_when_its_recurrence_says(services: list[list[float]], bound: int) -> None:
    places = [0] * len(services)

    def compute(worker: int, _: float) -> float | None:
        places[worker] += 1
        return services[worker][places[worker] - 1] if places[worker] <= len(services[worker]) else None

    _, trace = traced(SSP(bound), Workload(len(services), compute), limit=Limit())
    found: list[list[float]] = [[] for _ in services]
    for record in trace.records:
        if isinstance(record.event, Push):
            found[record.event.worker].append(record.event.now)
    assert found == ssp_times(services, bound)


def test_a_run_by_hand() -> None:
    """SSP(1), worker 0 takes 1 s, worker 1 takes 4 s; . computes, | pushes, w waits

    second    1   2   3   4   5   6   7   8
    worker 0  |   |   w   w   |   w   w   w
    worker 1  .   .   .   |   .   .   .   |
    """
    stats, trace = traced(SSP(1), steady(1.0, 4.0), limit=Limit(8.0))
    events = [(r.event.worker, r.event.now, r.gap) for r in trace.records]
    assert events == [(0, 1.0, 1), (0, 2.0, 2), (1, 4.0, 0), (0, 5.0, 2), (1, 8.0, 0)]
    fast, slow = stats.workers
    assert (fast.iterations, fast.waited, fast.gap_max) == (3, 5.0, 2)
    assert (slow.iterations, slow.waited, slow.gap_max) == (2, 0.0, 0)
    assert fast.report()["wait_share"] == pytest.approx(5 / 8)


def test_staleness_counts_the_updates_in_between() -> None:
    """ASP: while worker 1 computes for 4 s, worker 0 makes the updates 1 to 4 (at 4 s it is first)."""
    stats, _ = traced(ASP(), steady(1.0, 4.0), limit=Limit(4.0))
    assert stats.workers[1].staleness_max == 4
    assert stats.workers[0].staleness_max == 0


def test_a_round_of_bsp_is_one_update_without_staleness() -> None:
    stats, _ = traced(BSP(), steady(1.0, 2.0, 3.0), limit=Limit(30.0))
    assert (stats.updates, stats.samples) == (10, 30)
    assert Figures.of(stats).staleness_max == 0
    assert Figures.of(stats).wait_share == pytest.approx((2 + 1) / 9)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("network", [None, NETWORK], ids=["free", "slow"])
def test_what_holds_of_every_run(name: str, network: Network | None) -> None:
    policy = POLICIES[name]()
    stats, trace = traced(policy, stalls(), limit=Limit(pushes=300), network=network)
    times = [record.event.now for record in trace.records]
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert sum(isinstance(record.event, Leave) for record in trace.records) == 4
    assert sum(w.applied + w.dropped for w in stats.workers) == sum(w.iterations for w in stats.workers)
    assert 300 <= stats.samples <= 304
    assert stats.seconds == times[-1]
    if policy.bound is not None:
        assert max(record.gap for record in trace.records) <= policy.bound + 1


@pytest.mark.parametrize("name", CAPPED)
def test_a_worker_that_dies_does_not_stop_the_others(name: str) -> None:
    at, noticed = 20.0, 30.0
    workload = Workload(3, stalls(3).compute, (Loss(1, at, noticed),))
    _, trace = traced(CAPPED[name](), workload, limit=Limit(200.0))
    of_the_dead = [record.event for record in trace.records if record.event.worker == 1]
    assert isinstance(of_the_dead[-1], Leave)
    assert of_the_dead[-1].now == noticed
    assert all(event.now <= at for event in of_the_dead[:-1])
    assert trace.records[-1].event.now > 190.0


def test_a_run_that_is_over_early_ends_with_its_last_leave() -> None:
    """At 5 s worker 0 goes on with its fifth push, before the tenth of all is there; so it leaves at 6 s."""
    stats, _ = traced(SSP(1), steady(1.0, 1.0), limit=Limit(seconds=100.0, pushes=10))
    assert (stats.seconds, stats.samples) == (6.0, 11)


def test_workers_without_more_data_leave() -> None:
    stats = simulate(SSP(1), Workload(2, lambda worker, now: 1.0 if now < 5 else None), limit=Limit())
    assert [worker.iterations for worker in stats.workers] == [5, 5]


def test_a_limit_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="seconds"):
        Limit(0.0)
    with pytest.raises(ConfigError, match="pushes"):
        Limit(pushes=0)
    with pytest.raises(ConfigError, match="worker"):
        listed([])


def test_a_million_pushes_of_a_thousand_workers_are_a_matter_of_seconds() -> None:
    """A twentieth of it here, in the same proportion; benchmarks/simulate_speed measures the whole."""
    begin = time.process_time()
    stats = simulate(DSSP(3, 15), stalls(1000), limit=Limit(math.inf, 50_000))
    assert stats.samples >= 50_000
    assert time.process_time() - begin < 60 / 20
