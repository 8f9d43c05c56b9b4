"""Runs the contract on this rank of an MPI job, each clause on a communicator of its own."""

from __future__ import annotations

import os
import sys
import time

import torch
from mpi4py import MPI

from stalempi import abort
from stalempi.transport.mpi import MpiTransport

from .contract import CARRIED
from .refusals import REFUSED


def main() -> None:
    torch.set_num_threads(1)
    abort.install()
    only = sys.argv[1:]
    for clause in CARRIED + REFUSED:
        if only and clause.__name__ not in only:
            continue
        clause(MpiTransport(MPI.COMM_WORLD.Dup()))
        if MPI.COMM_WORLD.rank == 0:
            sys.stdout.write(f"{clause.__name__}\n")
            sys.stdout.flush()
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        time.sleep(0.3)
    os._exit(0)  # requests that the refusals left behind would keep MPI_Finalize waiting


if __name__ == "__main__":
    main()
