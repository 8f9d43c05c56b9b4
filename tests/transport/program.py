"""Runs the contract on this rank of an MPI job, each clause on a communicator of its own."""

from __future__ import annotations

import os
import sys
import time

import torch
from mpi4py import MPI

from stalempi import abort
from stalempi.transport import mpi
from stalempi.transport.mpi import MpiTransport

from .contract import CARRIED
from .refusals import REFUSED


def main() -> None:
    torch.set_num_threads(1)
    abort.install()
    mpi.MAX_MESSAGE_BYTES = 30_000  # so that what the clauses gather goes in several messages
    only = sys.argv[1:]
    for clause in CARRIED + REFUSED:
        if only and clause.__name__ not in only:
            continue
        clause(MpiTransport(MPI.COMM_WORLD.Dup()))
        _say(clause.__name__)
    MPI.COMM_WORLD.Barrier()
    _say("kept-by-all")
    time.sleep(0.5)
    os._exit(0)  # requests that the refusals left behind would keep MPI_Finalize waiting


def _say(word: str) -> None:
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write(f"{word}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
