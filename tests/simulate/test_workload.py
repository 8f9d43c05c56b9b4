"""Compute times come from a distribution, a file, or a scenario; a seed fixes them."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from stalempi.errors import ConfigError
from stalempi.policy import ASP, SSP
from stalempi.simulate.figures import Figures
from stalempi.simulate.scenarios import SCENARIOS, find_scenario
from stalempi.simulate.timing import Limit, simulate
from stalempi.simulate.workload import Workload, drawn, listed, parse_distribution, read_intervals


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("constant:2", 2.0),
        ("uniform:1:3", 2.0),
        ("normal:2:0.2", 2.0),
        ("exponential:2", 2.0),
        ("lognormal:2:0.5", 2.0 * 1.1331),
        ("pareto:1:3", 1.5),
    ],
)
def test_a_distribution_has_its_mean(text: str, mean: float) -> None:
    distribution, draw = parse_distribution(text), random.Random(1)
    assert statistics.fmean(distribution(draw) for _ in range(20_000)) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    "text", ["", "gauss:1", "normal:1", "normal:1:2:3", "constant:x", "constant:0", "uniform:1:-1"]
)
def test_a_distribution_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="distribution"):
        parse_distribution(text)


def test_a_list_is_used_in_order_and_again() -> None:
    workload = listed([[1.0, 2.0], [5.0]])
    assert [workload.compute(0, 0.0) for _ in range(5)] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert [workload.compute(1, 0.0) for _ in range(2)] == [5.0, 5.0]


def test_a_file_of_intervals(tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("# two workers\n0.1, 0.2 0.3\n\n1  # slow\n")
    assert read_intervals(path) == [[0.1, 0.2, 0.3], [1.0]]


@pytest.mark.parametrize(("text", "says"), [("1\n2 x", "line 2"), ("1\n0", "line 2"), ("# none", "holds no times")])
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "times").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_intervals(tmp_path / "times")


def times(workload: Workload, worker: int) -> list[float]:
    return [workload.compute(worker, 0.0) or 0.0 for _ in range(50)]


def test_a_seed_fixes_each_worker_alone() -> None:
    """Worker 1's draws are the same whether or not worker 0 has drawn before, so policies meet the same delays."""
    distribution = parse_distribution("exponential:1")
    first, second = drawn(distribution, 2, seed=3), drawn(distribution, 2, seed=3)
    times(first, 0)
    assert times(first, 1) == times(second, 1)
    assert times(first, 1) != times(drawn(distribution, 2, seed=4), 1)


def test_the_named_scenarios() -> None:
    wanted = ["homogeneous", "jitter", "stalls", "rotating", "straggler", "pair", "mixed", "dies"]
    assert list(SCENARIOS) == wanted


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    def run(seed: int) -> object:
        workload = find_scenario(name).workload(seed=seed, horizon=100.0)
        return simulate(SSP(3), workload, limit=Limit(100.0)).report()

    assert run(5) == run(5)
    assert (run(5) == run(6)) == (name == "homogeneous")


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("homogeneous", [1, 1, 1, 1]),
        ("straggler", [1, 1, 1, 1 / 3]),
        ("pair", [1, 1 / 1.9]),
        ("mixed", [1, 1 / 1.2, 1 / 1.5, 1 / 2]),
        ("stalls", [1 / 1.15] * 4),
        ("rotating", [0.875] * 4),
    ],
)
def test_nobody_waits_under_asp_so_each_worker_runs_at_its_own_rate(name: str, rates: list[float]) -> None:
    stats = simulate(ASP(), find_scenario(name).workload(seed=0, horizon=4000.0), limit=Limit(4000.0))
    assert [worker.iterations / 4000.0 for worker in stats.workers] == pytest.approx(rates, rel=0.03)


def test_the_unit_scales_time_and_nothing_else() -> None:
    scenario = find_scenario("rotating")
    second = simulate(SSP(3), scenario.workload(seed=0, horizon=200.0), limit=Limit(200.0))
    fast = simulate(SSP(3), scenario.workload(seed=0, horizon=25.0, unit=0.125), limit=Limit(25.0))
    assert Figures.of(fast).gap_mean == Figures.of(second).gap_mean
    assert fast.updates == second.updates


def test_a_worker_that_dies_leaves_when_that_is_noticed() -> None:
    """It pushes nothing after a third of the run; the others wait for it for 10 s at most, and then no more."""
    scenario = find_scenario("dies")
    stats = simulate(SSP(0), scenario.workload(seed=0, horizon=300.0), limit=Limit(300.0))
    assert stats.workers[1].ended == pytest.approx(110.0)
    assert stats.workers[1].iterations < 100
    assert stats.workers[0].iterations > 150


def test_a_scenario_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="scenario must be one of homogeneous"):
        find_scenario("storm")
    with pytest.raises(ConfigError, match="needs at least 2"):
        find_scenario("dies").workload(1, seed=0, horizon=1.0)
