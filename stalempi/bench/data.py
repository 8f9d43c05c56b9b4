"""Brings the data set to every rank of a job, downloading at most once per node."""

from __future__ import annotations

from collections.abc import Callable

from stalempi.context import Context
from stalempi.train.data import Data

__all__ = ["load_in_turn"]

LIMIT = 6 * 3600.0  # seconds that a download may take


def load_in_turn(load: Callable[[bool], Data], context: Context, *, download: bool) -> Data:
    """Calls `load(may download)` on every rank, so that no two of them write the same files at once.

    Rank 0 comes first, then the first rank of every node (which finds the files there if nodes share a file system),
    then all others, who only read.
    """
    if not download:
        return load(False)
    turn = 0 if context.rank == 0 else 1 if context.local_rank == 0 else 2
    found: Data | None = None
    for now in range(3):
        if now == turn:
            found = load(turn < 2)
        if now < 2:
            context.transport.allgather(b"", LIMIT)
    assert found is not None
    return found
