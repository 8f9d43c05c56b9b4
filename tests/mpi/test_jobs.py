"""Whole jobs end, with balanced books, on every transport there is."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launch import MPICH, mpirun, start

pytestmark = pytest.mark.mpi
PROGRAMS = Path(__file__).with_name("programs")
TCP = ("--mca", "btl", "self,tcp")


@pytest.mark.parametrize("flags", [(), TCP], ids=["shared memory", "tcp"])
def test_every_policy_trains_on_uneven_data_and_keeps_its_bound(flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAMS / "uneven.py", 4, flags=flags, timeout=120)
    assert done.code == 0, done.err
    assert done.out.count("balanced") == 6


@pytest.mark.skipif(MPICH is None, reason="no MPICH here: scripts/test puts one in .mpich")
def test_every_policy_trains_under_mpich() -> None:
    done = mpirun(PROGRAMS / "uneven.py", 4, mpich=True, timeout=120)
    assert done.code == 0, done.err
    assert done.out.count("balanced") == 6


def test_the_users_own_messages_never_meet_ours() -> None:
    done = mpirun(PROGRAMS / "foreign.py", 3)
    assert done.code == 0, done.err
    assert done.out.count("met nobody") == 3


def test_a_worker_paused_in_mid_run_holds_nobody_up_and_loses_nothing(tmp_path: Path) -> None:
    job = start(PROGRAMS / "pause.py", 3, str(tmp_path), flags=TCP)
    try:
        _wait_for(tmp_path / "clock-1")
        _wait_for(tmp_path / "clock-2")
        paused = int((tmp_path / "pid-1").read_text())
        time.sleep(0.5)
        os.kill(paused, signal.SIGSTOP)
        time.sleep(0.5)
        before = [_clock(tmp_path, rank) for rank in (1, 2)]
        time.sleep(2)
        after = [_clock(tmp_path, rank) for rank in (1, 2)]
        os.kill(paused, signal.SIGCONT)
    finally:
        done = job.finish(60)
    assert done.code == 0, done.err
    assert after[0] == before[0]
    assert after[1] > before[1] + 5
    assert int(done.out.split()[1]) > after[0]


@pytest.mark.parametrize("flags", [(), TCP], ids=["shared memory", "tcp"])
def test_a_worker_paused_in_the_middle_of_a_push_loses_nothing(flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAMS / "midpush.py", 3, flags=flags, timeout=90)
    assert done.code == 0, done.err
    lines = dict(line.split(" ", 1) for line in done.out.splitlines())
    assert int(lines["sent"].split()[-1]) > 10  # of 50 buckets
    difference, applied = lines["difference"].split(" ", 1)
    assert float(difference) < 1e-5
    assert applied == "[8, 8]"
    assert done.seconds > 5


def _wait_for(path: Path) -> None:
    ends = time.monotonic() + 40
    while not path.exists():
        assert time.monotonic() < ends, f"{path.name} never came"
        time.sleep(0.05)


def _clock(folder: Path, rank: int) -> int:
    return int((folder / f"clock-{rank}").read_text())
