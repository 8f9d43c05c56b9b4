"""Rows of figures come at their time, say what happened since the row before, and outlive a kill."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from stalempi.bench.metrics import JsonLines, Metrics, _scalars, check_board, row_of
from stalempi.errors import ConfigError
from stalempi.policy import Push
from stalempi.stats import RunStats, WorkerStats


class Run:
    """A run of two workers, each push of 10 samples."""

    def __init__(self) -> None:
        self.stats = RunStats([WorkerStats(), WorkerStats()], started=100.0)

    def push(self, metrics: Metrics, now: float, worker: int, *, waited: float = 0.0, staleness: int = 0) -> None:
        mine = self.stats.workers[worker]
        mine.iterations, mine.samples, mine.waited = mine.iterations + 1, mine.samples + 10, mine.waited + waited
        mine.count_gap(mine.iterations - min(w.iterations for w in self.stats.workers))
        mine.count_staleness(staleness)
        self.stats.updates, self.stats.samples = self.stats.updates + 1, self.stats.samples + 10
        self.stats.count_loss(2.0)
        metrics(Push(worker, now), [])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_row_stands_in_the_file_at_once_and_the_last_one_at_the_end(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "metrics.jsonl"
    with Metrics(lambda: run.stats, lambda: 0.25, 2.0, [JsonLines(path)]) as metrics:
        run.push(metrics, 101.0, 0)
        assert read(path) == []
        run.push(metrics, 102.0, 1, waited=1.5, staleness=1)
        assert len(read(path)) == 1
        run.push(metrics, 103.0, 0, staleness=1)
        run.push(metrics, 106.0, 0, waited=1.0, staleness=3)
        run.push(metrics, 107.0, 1)
    first, second, last = read(path)
    assert (first["seconds"], first["samples"], first["updates"], first["loss"], first["lr"]) == (2.0, 20, 2, 2.0, 0.25)
    assert (first["samples_per_second"], first["staleness_mean"], first["gap_mean"]) == (10.0, 0.5, 0.5)
    assert [worker["wait_share"] for worker in first["workers"]] == [0.0, 0.75]
    assert (second["seconds"], second["samples_per_second"]) == (6.0, 5.0)
    assert (second["staleness_mean"], second["staleness_max"]) == (2.0, 3)
    assert (second["gap_mean"], second["gap_max"]) == (1.5, 2)
    assert [worker["wait_share"] for worker in second["workers"]] == [0.25, 0.0]
    assert [worker["samples_per_second"] for worker in second["workers"]] == [5.0, 0.0]
    assert (last["seconds"], last["samples"], last["staleness_max"]) == (7.0, 50, 3)


def test_a_row_is_json_before_there_is_a_loss() -> None:
    row = row_of(RunStats([WorkerStats()]), RunStats([WorkerStats()]), seconds=0.0)
    assert row["loss"] is None
    assert math.isfinite(row["samples_per_second"])
    assert "loss" not in _scalars(row)


def test_tensorboard_gets_each_workers_figures_by_name() -> None:
    before = RunStats([WorkerStats()])
    row = row_of(RunStats([WorkerStats(samples=30)], samples=30, loss=1.0), before, seconds=2.0)
    scalars = _scalars(row)
    assert scalars["worker 0/samples_per_second"] == 15.0
    assert scalars["loss"] == 1.0


def test_a_missing_tensorboard_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalempi.bench.metrics.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'stalempi\[tensorboard\]'"):
        check_board()
    monkeypatch.setattr("stalempi.bench.metrics.find_spec", importlib.util.find_spec)
    check_board()
