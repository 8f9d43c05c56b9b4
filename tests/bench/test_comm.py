"""stalempi-bench comm measures every rival in one run, and says which sizes it cannot measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stalempi.bench import comm
from stalempi.bench.comm import Timing, parse_sizes, row_of
from stalempi.errors import ConfigError

COMM = [sys.executable, "-m", "stalempi.bench", "comm"]


@pytest.mark.mpi
def test_every_rival_is_measured_and_written_down(tmp_path: Path) -> None:
    words = ["-n", "2", "--sizes", "4KB,2MB", "--repeats", "1", "--out", str(tmp_path)]
    done = subprocess.run([*COMM, *words], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "comm.json").read_text())
    small, large = result["rows"]
    assert (small["bytes"], large["bytes"]) == (4000, 2_000_000)
    assert set(small["timings"]) == {"push", "step", "raw", "memcpy", "gloo"}
    assert set(large["timings"]) == {*small["timings"], "raw in buckets"}
    assert all(timing["seconds"] > 0 for row in result["rows"] for timing in row["timings"].values())
    assert done.stdout.count("us ") + done.stdout.count("ms ") >= 8
    assert (tmp_path / "comm.png").stat().st_size > 1000
    assert (tmp_path / "comm.md").read_text().count("\n") == 4


def test_figures_follow_from_the_timings() -> None:
    found = {
        "push": Timing(0.02, 100.0),
        "step": Timing(0.04, 50.0),
        "raw": Timing(0.02, 100.0),
        "raw in buckets": Timing(0.016, 125.0),
        "memcpy": Timing(0.005, 200.0),
        "gloo": Timing(0.06, 30.0),
    }
    row = row_of(1000, found, 32)
    assert (row["times_raw"], row["faster_than_gloo"]) == (1.25, 3.0)
    assert (row["goodput"], row["memcpy"], row["share_of_memcpy"]) == (200_000.0, 200_000.0, 1.0)
    assert (row["ceiling_samples_per_second"], row["share_of_ceiling"]) == (4000.0, 0.4)
    del found["gloo"], found["push"]  # as with allreduce, on several nodes
    row = row_of(1000, found, 32)
    assert (row["times_raw"], row["faster_than_gloo"]) == (2.5, None)


def test_sizes_are_a_range_or_a_list() -> None:
    assert parse_sizes("1KB..1MB") == [1000, 10_000, 100_000, 1_000_000]
    assert parse_sizes("1KB..2KB") == [1000]
    assert parse_sizes("4B, 40MB,1GB") == [4, 40_000_000, 1_000_000_000]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "say how many ranks to start, as in -n 2"),
        ("-n 1", "at least 2 ranks"),
        ("-n 2 --sizes 10", "'10' is no size"),
        ("-n 2 --sizes 6B", "whole float32"),
        ("-n 2 --sizes 1MB..1KB", "the second is smaller"),
        ("-n 2 --sizes 900GB", "are free: give smaller sizes"),
        ("-n 2 --policy ssp", "policy ssp needs bound"),
        ("-n 2 --out /proc/nowhere", "cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "is_launched", lambda environment: False)
    monkeypatch.setattr(comm, "relaunch", lambda *_: pytest.fail("launched"))
    with pytest.raises(ConfigError, match=said):
        comm.comm(words.split(), standalone_mode=False)
