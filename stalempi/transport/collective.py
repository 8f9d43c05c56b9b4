"""Adds up over all ranks by nonblocking MPI, where there is no server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from stalempi.transport.backoff import wait_for
from stalempi.transport.base import PeerEnd

__all__ = ["MpiPeerEnd"]

# MPI adds up in host memory and in these types only: nonblocking reductions of device memory, and any arithmetic on
# bfloat16, are wrong or missing in libraries that are in use.
_TYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}


class MpiPeerEnd(PeerEnd):
    """See `Transport.peer_end`."""

    def __init__(self, comm: MPI.Intracomm, ticket: bytearray, tickets: bytearray, sums: Sequence[Tensor]) -> None:
        self._comm, self._ticket, self._tickets = comm, ticket, tickets
        self._sums: list[Any] = [[sums_.numpy(), _TYPES[sums_.dtype]] for sums_ in sums]
        self._on_way: list[MPI.Request] = []
        self._oldest = 0

    def sum(self, place: int) -> None:
        self._on_way.append(self._comm.Iallreduce(MPI.IN_PLACE, self._sums[place]))

    def exchange(self) -> None:
        self._on_way.append(self._comm.Iallgather(self._ticket, self._tickets))

    def progress(self) -> None:
        # testing one request moves all of them; one that is complete would move none
        while self._oldest < len(self._on_way) and self._on_way[self._oldest].Test():
            self._oldest += 1

    def receive(self, timeout: float) -> bool:
        if not wait_for(lambda: bool(MPI.Request.Testall(self._on_way)), timeout, lambda: True):
            return False
        self._on_way.clear()
        self._oldest = 0
        return True

    def close(self) -> None:
        assert not self._on_way, "something is on its way"
