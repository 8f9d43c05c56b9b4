"""MPI, over shared memory and TCP, and the in-process twin keep the same contract."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stalempi.errors import StallError
from stalempi.transport.base import Transport
from stalempi.transport.inproc import InprocTransport, run_ranks
from tests.launch import MPICH, Finished, mpirun

from .contract import CARRIED
from .ends import RANKS, Server, Worker, parameters
from .refusals import REFUSED

CONTRACT = CARRIED + REFUSED
PROGRAM = ["-m", "tests.transport.program"]
ROOT = {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
@pytest.mark.parametrize("delivery", [0.0, 0.02], ids=["at once", "later"])
def test_the_in_process_twin_keeps_the_contract(clause: Callable[[Transport], None], delivery: float) -> None:
    run_ranks(clause, RANKS, delivery=delivery)


def kept(done: Finished) -> None:
    """Checks that every clause ran on every rank; what a launcher says of ranks that end so abruptly may follow."""
    expected = [*(clause.__name__ for clause in CONTRACT), "kept-by-all"]
    assert done.out.split()[: len(expected)] == expected, done.err


@pytest.mark.mpi
@pytest.mark.parametrize("flags", [(), ("--mca", "btl", "self,tcp")], ids=["shared memory", "tcp"])
def test_open_mpi_keeps_the_contract(flags: tuple[str, ...]) -> None:
    kept(mpirun(PROGRAM, RANKS, flags=flags, env=ROOT))


@pytest.mark.mpi
@pytest.mark.skipif(MPICH is None, reason="no MPICH here: scripts/test puts one in .mpich")
def test_mpich_keeps_the_contract() -> None:
    kept(mpirun(PROGRAM, RANKS, mpich=True, env=ROOT))


def test_a_release_on_its_way_is_unsettled_until_it_is_read() -> None:
    first, second = InprocTransport.group(2, delivery=0.3)
    server, worker = Server(first), Worker(second)
    parts, other = parameters(1), parameters(2)
    worker.push(1)
    assert server.await_messages(1) == [0]
    server.release(0, parts, step=1)
    assert not server.end.settle(parts, 0.01)
    assert server.end.settle(other, 0.01)
    with pytest.raises(StallError, match=r"a release was not received within 0\.01 s"):
        server.end.close(0.01)
    began = time.monotonic()
    assert worker.end.receive(5.0)
    assert time.monotonic() - began > 0.1
    assert server.end.settle(parts, 0.01)
    server.end.close(0.01)


def test_a_rank_that_never_comes_is_named_by_each_that_waits() -> None:
    with pytest.raises(StallError, match=r"1, 2 did not join within 0\.1 s"):
        InprocTransport.group(3)[0].allgather(b"", 0.1)
