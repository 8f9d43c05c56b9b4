"""stalempi-bench simulate and compare: what they print and write, and how they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stalempi.bench.compare import compare
from stalempi.bench.simulate import simulate
from stalempi.errors import ConfigError
from stalempi.trace import read_trace

Run = Callable[..., str]


@pytest.fixture
def run() -> Run:
    """Runs a command in a terminal of 60 columns and returns what it printed."""

    def call(command: click.Command, *words: str) -> str:
        result = CliRunner(env={"COLUMNS": "60"}).invoke(command, words)
        if result.exception:
            raise result.exception
        return result.stdout

    return call


def figures(text: str) -> dict[str, float]:
    found = json.loads(text)["figures"]
    assert isinstance(found, dict)
    return found


def test_simulate_says_how_the_run_went(run: Run) -> None:
    text = run(simulate, "--policy", "ssp", "--bound", "3", "--scenario", "pair", "--seconds", "50")
    assert "policy: ssp(bound=3)" in text
    assert "largest 4" in text
    assert max(map(len, text.splitlines())) <= 60


def test_simulate_prints_the_figures_of_a_real_run_as_json(run: Run) -> None:
    result = json.loads(run(simulate, "--json", "--seconds", "20"))
    assert {"seconds", "samples", "updates", "workers", "figures", "policy"} <= set(result)
    assert len(result["workers"]) == 4
    assert result["seconds"] == 20.0


def test_the_same_words_give_the_same_run(run: Run) -> None:
    words = ("--json", "--pushes", "300", "--seed", "4")
    assert run(simulate, *words) == run(simulate, *words)
    assert run(simulate, *words) != run(simulate, *words[:-1], "5")


@pytest.mark.parametrize("controller", ["dyn", "paper-capped"])
def test_a_recorded_run_is_played_back_and_decides_the_same(run: Run, tmp_path: Path, controller: str) -> None:
    file = str(tmp_path / "run.jsonl")
    first = run(simulate, "--controller", controller, "--pushes", "300", "--latency-ms", "1", "--record", file)
    text = run(simulate, "--trace", file)
    assert "decided otherwise: 0 of" in text
    assert "(+0.0%)" in text
    assert read_trace(Path(file)).start.options["controller"] == controller
    assert f"controller={controller}" in first.replace("\n", "")


def test_a_recorded_run_under_another_policy(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "run.jsonl")
    run(simulate, "--pushes", "300", "--record", file)
    assert figures(run(simulate, "--trace", file, "--policy", "ssp", "--bound", "1", "--json"))["gap_max"] == 2


def test_intervals_from_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "times").write_text("1\n1\n4\n")
    words = ("--intervals", str(tmp_path / "times"), "--policy", "bsp", "--seconds", "40", "--json")
    assert figures(run(simulate, *words))["updates_per_second"] == pytest.approx(0.25)


def test_a_distribution_and_many_workers(run: Run) -> None:
    text = run(simulate, "--compute", "exponential:0.1", "--workers", "20", "--pushes", "500")
    assert "and 4 more workers" in text


def test_the_network_slows_a_run_down(run: Run) -> None:
    """A round is 0.1 s of computing, 10 ms on the link for each release before and each push after, 5 ms of work.

    The k-th worker to be released (k = 1 .. 4) pushes 0.1 s later, and its push is in 10 ms after that; the last one is
    in 0.04 + 0.1 + 0.01 s after the round began.
    """
    words = ("--scenario", "homogeneous", "--policy", "bsp", "--seconds", "50", "--json")
    free = figures(run(simulate, *words))
    slow = figures(run(simulate, *words, "--bandwidth", "100", "--message-mb", "1", "--service-ms", "5"))
    assert free["updates_per_second"] == pytest.approx(10.0, rel=0.01)
    assert slow["updates_per_second"] == pytest.approx(1 / 0.155, rel=0.01)


def test_a_slow_link_of_one_worker_and_handshakes(run: Run) -> None:
    """Its iteration is 0.1 s of computing, 10 ms and 100 ms each way, and a handshake of 20 ms each way before that."""
    words = ("--scenario", "homogeneous", "--policy", "bsp", "--seconds", "90", "--message-mb", "1", "--json")
    slow = figures(run(simulate, *words, "--link", "2=10:10", "--handshakes", "1"))
    assert slow["updates_per_second"] == pytest.approx(1 / (0.1 + 2 * (0.01 + 0.1 + 0.02)), rel=0.02)


def test_simulate_learns(run: Run) -> None:
    result = json.loads(run(simulate, "--learn", "digits", "--model", "mlp", "--samples", "1600", "--json"))
    assert result["curve"][-1]["accuracy"] > 0.5
    assert result["samples"] >= 1600


def test_compare_fits_a_narrow_terminal(run: Run) -> None:
    text = run(compare, "--policies", "bsp,ssp:3,dssp:3:15:paper-capped", "--seeds", "2", "--seconds", "20")
    assert max(map(len, text.splitlines())) <= 60
    assert "clairvoyant:15" in text


def test_compare_has_a_row_for_each_policy_and_the_bound(run: Run) -> None:
    result = json.loads(run(compare, "--policies", "asp,ssp:3,ssp:7", "--seeds", "2", "--seconds", "20", "--json"))
    rows = {row["label"]: row for row in result["rows"]}
    assert list(rows) == ["asp", "ssp:3", "ssp:7", "clairvoyant:7"]
    assert rows["clairvoyant:7"]["is_bound"]
    throughput = {label: row["outcomes"][0]["figures"]["gradients_per_second"] for label, row in rows.items()}
    assert throughput["ssp:3"] <= throughput["ssp:7"] == throughput["clairvoyant:7"] <= throughput["asp"]


def test_compare_without_a_bound_has_no_such_row(run: Run) -> None:
    assert "clairvoyant" not in run(compare, "--policies", "asp", "--seeds", "1", "--seconds", "5")


def test_compare_writes_table_picture_and_figures(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ("--policies", "bsp,ssp:3", "--seeds", "2", "--learn", "digits", "--model", "mlp", "--samples", "1200")
    text = run(compare, *words, "--target", "0.3", "--out", str(tmp_path))
    assert "samples to 0.3" in text
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "comparison.md").read_text().splitlines()
    assert table[0].startswith("| policy | grad/s | upd/s | wait | gap mean/max | stale | s to 0.3 |")
    assert len(table) == 2 + 3
    assert json.loads((tmp_path / "comparison.json").read_text())["target"] == 0.3


def test_a_picture_needs_matplotlib(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"stalempi\[plot\]"):
        run(compare, "--policies", "asp", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        (simulate, ["--scenario", "pair", "--compute", "constant:1"], "one of --scenario, --compute"),
        (simulate, ["--compute", "constant:1", "--iteration-ms", "5"], "--iteration-ms is of a scenario"),
        (simulate, ["--lr", "0.1"], "--lr without --learn"),
        (simulate, ["--learn", "digits", "--pushes", "5"], "leave --pushes out"),
        (simulate, ["--learn", "digits", "--message-mb", "5"], "the model's own size"),
        (simulate, ["--trace", "none.jsonl", "--seed", "1"], "leave --seed out"),
        (simulate, ["--trace", "none.jsonl"], "cannot be read"),
        (simulate, ["--scenario", "dies", "--workers", "1"], "needs at least 2"),
        (simulate, ["--policy", "ssp"], "needs bound"),
        (simulate, ["--link", "2"], "--link takes WORKER=MS"),
        (simulate, ["--link", "1=5:0"], "bandwidth of a link must be above 0"),
        (simulate, ["--link", "1=5", "--link", "1=6"], "worker 1 has a link already"),
        (simulate, ["--link", "4=5"], "5 links for 4 worker"),
        (simulate, ["--policy", "allreduce"], "no server to play: take bsp"),
        (compare, ["--policies", "asp,allreduce"], "allreduce is for --real"),
        (compare, ["--policies", "ssp"], "needs bound"),
        (compare, ["--target", "0.5"], "add --learn"),
        (compare, ["--learn", "digits", "--seconds", "5"], "leave --seconds out"),
    ],
)
def test_what_cannot_be_is_refused(run: Run, command: click.Command, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(command, *words)


def test_the_uncapped_paper_policy_warns_in_one_line() -> None:
    result = CliRunner().invoke(simulate, ["--controller", "paper", "--seconds", "20"])
    assert result.exit_code == 0
    assert result.stderr.startswith("stalempi-bench: warning: DSSP as written in the paper has no bound")
    assert len(result.stderr.splitlines()) == 1
