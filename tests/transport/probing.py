"""Probes a ring of two ranks, with CPU memory standing in for a GPU's: probing.py."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
from mpi4py import MPI

from stalempi.errors import ConfigError
from stalempi.transport.cuda_aware import Answer, query_library
from stalempi.transport.probe import choose_path, probe


def main() -> None:
    comm = MPI.COMM_WORLD.Dup()
    rank, cpu = comm.Get_rank(), torch.device("cpu")
    assert probe(comm, lambda count: torch.empty(count, dtype=torch.uint8))
    assert choose_path(comm, cpu) == (False, "host memory")
    yes, no = Answer(True, "it says so"), Answer(False, "it says no")
    tried = choose_path(comm, cpu, answer=yes)
    assert tried == (True, "GPU memory as it is (it says so, and a probe arrived)"), tried
    # one rank only has memory that may go as it is; the other one helps it to find out
    assert choose_path(comm, cpu, answer=yes if rank else no)[0] == bool(rank)
    if rank == 0:
        sys.stdout.write(f"query says {'yes' if query_library() else 'no'}\n")
        sys.stdout.flush()
    # a message that never comes: the neighbour does not take part
    if rank == 0:
        assert not probe(comm, lambda count: torch.empty(count, dtype=torch.uint8), timeout=0.2)
    comm.Barrier()
    forced = Answer(True, "STALEMPI_CUDA_AWARE=1")
    broken = MPI.COMM_WORLD.Dup()
    hopes = torch.zeros(2, dtype=torch.uint8)
    if rank == 1:  # says that it hopes, and then sends nothing
        broken.Allgather(torch.ones(1, dtype=torch.uint8), hopes)
    else:
        with pytest.raises(ConfigError, match="unset it, or make it 0"):
            choose_path(broken, cpu, answer=forced, timeout=0.2)
    broken.Barrier()
    if rank == 0:
        sys.stdout.write("kept by all\n")
        sys.stdout.flush()
        time.sleep(0.5)
    os._exit(0)  # the requests that never end would keep MPI_Finalize waiting


main()
