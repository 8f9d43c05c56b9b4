"""Without a server the same program gives what one process gives: uneven batches, workers that run out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import MPICH, mpirun

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("programs") / "allreduce.py"
TCP = ("--mca", "btl", "self,tcp")


@pytest.mark.parametrize(("ranks", "flags"), [(2, ()), (3, TCP)], ids=["2", "3 over TCP"])
def test_it_equals_one_process_on_the_joined_batches(ranks: int, flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAM, ranks, flags=flags)
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()] == ["momentum", "adam"]


@pytest.mark.skipif(MPICH is None, reason="no MPICH here: scripts/test puts one in .mpich")
def test_it_does_so_under_mpich() -> None:
    done = mpirun(PROGRAM, 3, mpich=True)
    assert done.code == 0, done.err
