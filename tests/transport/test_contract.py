"""MPI, over shared memory and TCP, and the in-process twin keep the same contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stalempi.errors import StallError
from stalempi.transport.base import Transport
from stalempi.transport.inproc import InprocTransport, run_ranks
from tests.launch import MPICH, Finished, mpirun

from .contract import CONTRACT, RANKS

PROGRAM = Path(__file__).with_name("contract.py")


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
@pytest.mark.parametrize("delivery", [0.0, 0.02], ids=["at once", "later"])
def test_the_in_process_twin_keeps_the_contract(clause: Callable[[Transport], None], delivery: float) -> None:
    run_ranks(clause, RANKS, delivery=delivery)


def kept(done: Finished) -> None:
    assert done.out.split() == [clause.__name__ for clause in CONTRACT], done.err


@pytest.mark.mpi
@pytest.mark.parametrize("flags", [(), ("--mca", "btl", "self,tcp")], ids=["shared memory", "tcp"])
def test_open_mpi_keeps_the_contract(flags: tuple[str, ...]) -> None:
    kept(mpirun(PROGRAM, RANKS, flags=flags))


@pytest.mark.mpi
@pytest.mark.skipif(MPICH is None, reason="no MPICH here: scripts/test puts one in .mpich")
def test_mpich_keeps_the_contract() -> None:
    kept(mpirun(PROGRAM, RANKS, mpich=True))


def test_a_rank_that_never_comes_is_noticed() -> None:
    transport = InprocTransport.group(2)[0]
    with pytest.raises(StallError, match=r"not all 2 ranks met within 0\.1 s"):
        transport.allgather(b"", 0.1)
