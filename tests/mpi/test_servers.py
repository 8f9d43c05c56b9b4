"""Several servers over MPI are one server, and a lost one ends the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import mpirun

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("programs") / "servers.py"
TCP = ("--mca", "btl", "self,tcp")


@pytest.mark.parametrize(("servers", "workers", "flags"), [(2, 2, ()), (3, 2, TCP)], ids=["2", "3 over TCP"])
def test_bsp_on_several_servers_is_training_in_one_process(servers: int, workers: int, flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAM, servers + workers, str(servers), flags=flags, timeout=90)
    assert done.code == 0, done.err
    assert float(done.out) < 1e-5


def test_a_server_that_is_killed_ends_the_job() -> None:
    done = mpirun(PROGRAM, 4, "2", "die", "1", timeout=60)
    assert done.code not in (0, None)
    assert "rank 1" in done.err
    assert done.seconds < 40


def test_a_signal_to_any_server_stops_the_job() -> None:
    done = mpirun(PROGRAM, 4, "2", "term", "1", timeout=60)
    assert done.code == 75, done.err
    assert done.err.count("stalempi: stopped by") == 1, done.err
    assert done.out == ""


def test_what_one_server_refuses_is_told_once() -> None:
    done = mpirun(PROGRAM, 3, "2", "nan", timeout=60)
    assert done.code not in (0, None)
    assert done.err.count("pushed a gradient with NaN or infinity at step 8") == 1, done.err


def test_the_command_trains_on_two_servers(tmp_path: Path) -> None:
    words = "train -n 4 --servers 2 --policy dssp --lower 1 --upper 3 --dataset digits --epochs 4 --evaluate-every 2000"
    command = ["-m", "stalempi.bench", *words.split()[:1], *words.split()[3:], "--out", str(tmp_path)]
    done = mpirun(command, 4, flags=TCP, timeout=120)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["options"]["servers"] == 2
    assert len(result["share_bytes"]) == 2
    assert 0 < min(result["share_bytes"]) <= max(result["share_bytes"])
    assert "2 worker(s), 2 servers (" in done.err
    assert len(result["workers"]) == 2
    assert result["accuracy"] > 0.6
    assert len(result["curve"]) >= 3
