"""Gradients leave while backward goes on, also where nothing moves by itself, and runs ahead keep to the bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import mpirun

pytestmark = pytest.mark.mpi
PROGRAMS = Path(__file__).with_name("programs")
TCP = ("--mca", "btl", "self,tcp")


def test_gradients_travel_in_every_way_over_tcp_without_changing_a_bit() -> None:
    done = mpirun(PROGRAMS / "equal.py", 2, "asp:hooks", "asp:thread:early", "asp:off:early", flags=TCP)
    assert done.code == 0, done.err
    assert [float(line.split()[-1]) for line in done.out.splitlines()] == [0.0] * 6


@pytest.mark.parametrize("flags", [(), TCP], ids=["shared memory", "tcp"])
def test_forward_begins_while_the_server_still_steps_and_uses_nothing_that_is_not_there(flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAMS / "early.py", 2, flags=flags)
    assert done.code == 0, done.err
    at_step, by_layer, difference = (json.loads(line) for line in done.out.splitlines())
    assert at_step[0] == 8  # the first release comes whole
    assert max(at_step[1:]) < 4  # of 8 parts; one comes every 20 ms
    assert by_layer == sorted(by_layer)
    assert by_layer[-1] == 8
    assert difference == 0.0


@pytest.mark.parametrize(("way", "flags"), [("hooks", ()), ("hooks", TCP), ("thread", TCP), ("off", TCP)])
def test_most_of_a_push_has_left_when_a_slow_backward_is_over(way: str, flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAMS / "overlap.py", 2, way, flags=flags)
    assert done.code == 0, done.err
    assert float(done.out) == 0 if way == "off" else float(done.out) > 0.4


@pytest.mark.parametrize("flags", [(), TCP], ids=["shared memory", "tcp"])
def test_an_exception_in_the_middle_of_a_push_is_what_the_user_sees(flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAMS / "overlap.py", 2, "thread", "fail", flags=flags)
    assert done.code not in (0, None), done.err
    assert done.err.count("ValueError: boom in backward") == 1, done.err
    assert "announces" not in done.err


def test_a_run_ahead_trains_and_keeps_to_the_bound(tmp_path: Path) -> None:
    words = "train --policy ssp --bound 2 --run-ahead --dataset digits --epochs 3 --slow 1=3"
    command = ["-m", "stalempi.bench", *words.split(), "--emulate-ms", "0.2", "--out", str(tmp_path)]
    done = mpirun(command, 3, flags=TCP, timeout=120)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["options"]["run_ahead"] is True
    assert max(worker["gap_max"] for worker in result["workers"]) <= 2
    assert result["accuracy"] > 0.5
    assert min(worker["staleness_mean"] for worker in result["workers"]) >= 1
