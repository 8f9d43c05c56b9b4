"""A real run of four ranks decides the same when it is replayed, and the simulator predicts how long it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stalempi.simulate.predict import predict
from stalempi.trace import read_trace, replay
from tests.launch import mpirun

pytestmark = [pytest.mark.mpi, pytest.mark.alone]


@pytest.mark.parametrize("policy", [("--policy", "dssp"), ("--policy", "ssp", "--bound", "1")], ids=["dssp", "ssp"])
def test_a_run_of_four_ranks_is_replayed_exactly_and_predicted_within_ten_percent(
    policy: tuple[str, ...], tmp_path: Path
) -> None:
    """Replayed exactly each time; as for the time, a busy machine may have two tries more."""
    off = 1.0
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = ["-m", "stalempi.bench", "train", *policy, "--samples", "9000", "--scenario", "stalls"]
        words += ["--iteration-ms", "40", "--trace", str(folder / "trace"), "--out", str(folder)]
        done = mpirun(words, 4, timeout=120)
        assert done.code == 0, done.err
        trace = read_trace(folder / "trace")
        assert replay(trace) == []
        seconds = json.loads((folder / "result.json").read_text())["seconds"]
        off = abs(predict(trace) / seconds - 1)
        if off < 0.1:
            break
    assert off < 0.1
