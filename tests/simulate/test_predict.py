"""A recorded run's intervals predict its wall time, and that of another policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from stalempi.policy import ASP, BSP, DSSP, SSP, Leave, Policy
from stalempi.simulate.predict import predict, recorded
from stalempi.simulate.scenarios import SCENARIOS, find_scenario
from stalempi.simulate.timing import Limit, simulate
from stalempi.simulate.workload import Loss, Workload
from stalempi.trace import Start, Trace, read_trace, write_trace

from .runs import NETWORK, POLICIES, stalls, steady, traced


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("policy", [BSP(), SSP(3), DSSP(3, 15)], ids=["bsp", "ssp", "dyn"])
def test_a_run_predicts_itself_within_5_percent(name: str, policy: Policy) -> None:
    workload = find_scenario(name).workload(seed=0, horizon=200.0)
    stats, trace = traced(policy, workload, limit=Limit(pushes=600), network=NETWORK)
    assert predict(trace) == pytest.approx(stats.seconds, rel=0.05)


@pytest.mark.parametrize("name", POLICIES)
def test_over_a_free_network_it_predicts_every_event(name: str, tmp_path: Path) -> None:
    _, trace = traced(POLICIES[name](), stalls())
    write_trace(tmp_path / "run.jsonl", trace)
    trace = read_trace(tmp_path / "run.jsonl")
    _, again = traced(trace.start.make_policy(), recorded(trace), limit=Limit())
    assert [r.event.worker for r in again.records] == [r.event.worker for r in trace.records]
    assert [r.event.now for r in again.records] == pytest.approx([r.event.now for r in trace.records])
    assert [r.decisions for r in again.records] == [r.decisions for r in trace.records]


@pytest.mark.parametrize(("recorded_under", "asked"), [(SSP(3), ASP()), (ASP(), SSP(3)), (BSP(), DSSP(3, 15))])
def test_it_predicts_another_policy_within_5_percent(recorded_under: Policy, asked: Policy) -> None:
    _, trace = traced(recorded_under, stalls(seed=1), limit=Limit(pushes=2000))
    truth = simulate(asked, stalls(seed=1), limit=Limit(pushes=2000)).seconds
    assert predict(trace, asked) == pytest.approx(truth, rel=0.05)
    assert abs(trace.records[-1].event.now / truth - 1) > 0.05


def test_the_server_s_clock_need_not_begin_at_zero() -> None:
    """time.monotonic counts from the machine's start, and a float holds less after the point then."""
    stats, trace = traced(SSP(1), stalls())
    shifted = [type(r)(type(r.event)(r.event.worker, r.event.now + 1e6), r.gap, r.decisions) for r in trace.records]
    late = Trace(Start("ssp", {"bound": 1}, 4, 1e6), shifted)
    assert predict(late) == pytest.approx(stats.seconds, rel=1e-6)


def test_the_time_until_a_lost_worker_was_noticed_is_kept() -> None:
    """Worker 1 dies at 5 s and is noticed at 50 s, for which SSP(0) waits."""
    workload = Workload(2, steady(1.0, 1.0).compute, (Loss(1, 5.0, 50.0),))
    stats, trace = traced(SSP(0), workload, limit=Limit(pushes=20))
    assert stats.seconds > 50.0
    assert predict(trace) == pytest.approx(stats.seconds)


def test_a_worker_lost_while_it_waited_is_lost_then() -> None:
    workload = Workload(2, steady(1.0, 10.0).compute, (Loss(0, 1.5, 2.0),))
    _, trace = traced(SSP(0), workload, limit=Limit(pushes=3))
    leave = next(record.event for record in trace.records if isinstance(record.event, Leave))
    assert (leave.worker, leave.now) == (0, 2.0)
    assert recorded(trace).losses == (Loss(0, 2.0, 2.0),)
    assert predict(trace) == trace.records[-1].event.now


def test_a_run_that_was_cut_off_ends_with_its_last_event() -> None:
    _, trace = traced(SSP(2), stalls(), limit=Limit(20.0))
    assert predict(trace) == pytest.approx(trace.records[-1].event.now)
