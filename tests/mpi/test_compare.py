"""compare --real trains every policy in a job of its own and sums up what its result.json says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stalempi.bench.real import figures_of
from stalempi.simulate.figures import Figures
from stalempi.stats import RunStats, WorkerStats

COMPARE = [sys.executable, "-m", "stalempi.bench", "compare", "--real"]


@pytest.mark.mpi
def test_a_real_comparison_has_figures_and_a_curve_and_nobody_who_knows_the_future() -> None:
    words = "--learn digits --policies ssp:1,allreduce --workers 2 --seeds 1 --samples 2000 --iteration-ms 5 --json"
    done = subprocess.run([*COMPARE, *words.split()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["label"], row["is_bound"]) for row in rows] == [("ssp:1", False), ("allreduce", False)]
    for row, gap in zip(rows, (2, 0), strict=True):
        (outcome,) = row["outcomes"]
        assert outcome["figures"]["gap_max"] <= gap
        samples = [point["samples"] for point in outcome["curve"]]
        assert samples == sorted(samples)
        assert len(samples) > 20
        assert samples[-1] >= 2000
        assert outcome["curve"][-1]["accuracy"] > outcome["curve"][0]["accuracy"]


def test_figures_of_a_result_are_those_of_the_run() -> None:
    workers = [
        WorkerStats(iterations=4, samples=40, waited=1.0, ended=8.0, gap_sum=6, gap_max=3, staleness_sum=5, applied=4),
        WorkerStats(iterations=2, samples=10, waited=3.0, ended=8.0, gap_sum=1, gap_max=1, staleness_sum=2, applied=1),
    ]
    workers[0].staleness_max, workers[1].staleness_max, workers[1].dropped = 2, 2, 1
    stats = RunStats(workers, updates=5, samples=50, ended=8.0)
    assert figures_of(stats.report()) == Figures.of(stats)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--real trains: say on what"),
        ("--learn digits --latency-ms 3", "--latency-ms is of the virtual clock"),
        ("--learn digits --scenario dies", "a lost rank ends an MPI job"),
    ],
)
def test_what_only_a_virtual_clock_can_do_is_refused(words: str, said: str) -> None:
    done = subprocess.run([*COMPARE, *words.split()], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
