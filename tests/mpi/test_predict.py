"""A real run of four ranks decides the same when it is replayed, and the simulator predicts how long it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stalempi.simulate.predict import predict
from stalempi.trace import read_trace, replay
from tests.launch import mpirun

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("policy", [("--policy", "dssp"), ("--policy", "ssp", "--bound", "1")], ids=["dssp", "ssp"])
def test_a_run_of_four_ranks_is_replayed_exactly_and_predicted_within_ten_percent(
    policy: tuple[str, ...], tmp_path: Path
) -> None:
    words = ["-m", "stalempi.bench", "train", *policy, "--samples", "9000", "--scenario", "stalls"]
    words += ["--iteration-ms", "40", "--trace", str(tmp_path / "trace"), "--out", str(tmp_path)]
    done = mpirun(words, 4, timeout=120)
    assert done.code == 0, done.err
    trace = read_trace(tmp_path / "trace")
    seconds = json.loads((tmp_path / "result.json").read_text())["seconds"]
    assert replay(trace) == []
    assert predict(trace) == pytest.approx(seconds, rel=0.1)
