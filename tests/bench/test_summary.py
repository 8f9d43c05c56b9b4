"""stalempi-bench summary makes one table of many runs, and says which are missing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stalempi.bench.summary import read_rows, summary
from stalempi.errors import ConfigError, StalempiError
from stalempi.stats import RunStats, WorkerStats


def run(folder: Path, policy: str, seed: int, accuracy: float, **options: object) -> Path:
    """Writes what a run of train leaves behind, as far as a summary reads it."""
    worker = WorkerStats(iterations=50, samples=1600, waited=2.0, started=0.0, ended=10.0, applied=50, gap_sum=100)
    stats = RunStats([worker, worker], updates=100, samples=3200, started=0.0, ended=10.0)
    point = {"seconds": 10.0, "samples": 3200, "accuracy": accuracy, "loss": 0.1}
    result: dict[str, Any] = stats.report() | {"curve": [point]}
    result["options"] = {"policy": policy, "seed": seed, "out": str(folder), "lr": 0.1, **options}
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def printed(*words: str | Path) -> str:
    done = CliRunner(env={"COLUMNS": "130"}).invoke(summary, [str(word) for word in words])
    if done.exception:
        raise done.exception
    return done.stdout


def test_runs_of_one_policy_are_one_row_over_its_seeds(tmp_path: Path) -> None:
    folders = [run(tmp_path / str(i), "bsp" if i < 2 else "asp", i % 2, 0.9 + 0.02 * i) for i in range(4)]
    rows = read_rows(folders)
    assert [(row.label, len(row.outcomes)) for row in rows] == [("bsp", 2), ("asp", 2)]
    accuracy = rows[0].final_accuracy()
    assert accuracy is not None
    assert accuracy.mean == pytest.approx(0.91)
    text = printed(*folders)
    assert "0.9100 +-" in text
    assert "0.9500 +-" in text


def test_another_option_that_differs_makes_another_row(tmp_path: Path) -> None:
    folders = [run(tmp_path / str(lr), "bsp", 0, 0.9, lr=lr) for lr in (0.1, 0.2)]
    assert [row.label for row in read_rows(folders)] == ["bsp lr=0.1", "bsp lr=0.2"]


def test_csv_and_json_hold_the_same_figures(tmp_path: Path) -> None:
    folders = [run(tmp_path / str(i), "ssp(bound=3)", i, 0.96) for i in range(2)]
    [row] = csv.DictReader(printed(*folders, "--csv").splitlines())
    assert (row["policy"], row["seeds"]) == ("ssp(bound=3)", "2")
    assert float(row["gradients_per_second"]) == pytest.approx(10)
    assert float(row["wait_share"]) == pytest.approx(0.2)
    assert float(row["seconds_to_0.95"]) == pytest.approx(10)
    [found] = json.loads(printed(*folders, "--json"))["rows"]
    assert found["outcomes"][0]["figures"]["gradients_per_second"] == pytest.approx(10)


def test_missing_results_are_named_after_the_table(tmp_path: Path) -> None:
    there = run(tmp_path / "0", "bsp", 0, 0.9)
    (tmp_path / "1").mkdir()
    done = CliRunner().invoke(summary, [str(there), str(tmp_path / "1")])
    assert "bsp" in done.stdout
    assert isinstance(done.exception, StalempiError)
    assert str(done.exception) == f"1 of 2 runs have no result.json: {tmp_path / '1'}"


@pytest.mark.parametrize("text", ["{", "[]", '{"workers": []}', '{"options": {}}'])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=r"result.json is not the result of a stalempi-bench train"):
        printed(tmp_path)


def test_csv_and_json_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of --csv and --json"):
        printed(run(tmp_path / "0", "bsp", 0, 0.9), "--csv", "--json")
