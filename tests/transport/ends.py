"""A server's and a worker's end of a transport, with packets to fill, as the clauses of the contract use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stalempi.transport.base import Packet, Parts, ServerEnd, Transport, WorkerEnd
from stalempi.transport.message import HEADER_BYTES, Header, Kind

RANKS = 3
LONG = 30.0
GRADIENT = (300_000, 7)
PARAMETERS = (200_000, 5)


def payload(sizes: tuple[int, ...], fill: int = 0) -> list[Tensor]:
    return [torch.full((size,), fill, dtype=torch.uint8) for size in sizes]


def parameters(fill: int, *, staged: bool = False) -> Parts:
    return Parts(payload(PARAMETERS, fill), staged=staged)


def contents(packet: Packet) -> set[int]:
    """Returns the values of all bytes in a packet's parts."""
    return set(torch.cat(packet.parts.tensors).unique().tolist())


def change(header: Header, changes: dict[str, int]) -> Header:
    for name, value in changes.items():
        setattr(header, name, value)
    return header


class Server:
    """A server's end with packets of its own."""

    def __init__(self, transport: Transport, *, staged: bool = False, workers: Sequence[int] | None = None) -> None:
        workers = workers or range(1, transport.size)
        self.rank = transport.rank
        self.pushes = [Packet(HEADER_BYTES + 8, Parts(payload(GRADIENT), staged=staged)) for _ in workers]
        self.headers = [bytearray(HEADER_BYTES) for _ in self.pushes]
        self.end: ServerEnd = transport.server_end(self.pushes, self.headers, workers)

    def await_messages(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            arrived = self.end.receive(LONG)
            assert arrived, "nothing came"
            found += arrived
        return sorted(found)

    def await_leaves(self) -> None:
        """Takes a leave from every worker and closes this end."""
        assert self.await_messages(len(self.pushes)) == list(range(len(self.pushes)))
        assert {Header.unpack(packet.header).kind for packet in self.pushes} == {Kind.LEAVE}
        self.end.close(LONG)

    def release(
        self, worker: int, parts: Parts, *, step: int, empty: bool = False, changes: dict[str, int] | None = None
    ) -> None:
        self.write(worker, parts, step=step, empty=empty, changes=changes)
        self.end.release(worker, parts, empty=empty)

    def announce(self, worker: int, parts: Parts, *, step: int) -> None:
        self.write(worker, parts, step=step)
        self.end.announce(worker)

    def write(
        self, worker: int, parts: Parts, *, step: int, empty: bool = False, changes: dict[str, int] | None = None
    ) -> None:
        header = Header(Kind.RELEASE, sender=self.rank, layout=1, step=step, nbytes=0 if empty else parts.nbytes)
        change(header, changes or {}).pack_into(self.headers[worker])


class Worker:
    """A worker's end with packets of its own."""

    def __init__(
        self, transport: Transport, *, staged: bool = False, sizes: tuple[int, ...] = GRADIENT, server: int = 0
    ) -> None:
        self.rank = transport.rank
        self.pushed = Packet(HEADER_BYTES + 8, Parts(payload(sizes), staged=staged))
        self.released = Packet(HEADER_BYTES, Parts(payload(PARAMETERS), staged=staged))
        self.end: WorkerEnd = transport.worker_end(self.pushed, self.released, server)

    def header(self, message: Kind, step: int, **changes: int) -> None:
        nbytes = self.pushed.parts.nbytes if message is Kind.PUSH else 0
        header = Header(message, sender=self.rank, layout=1, step=step, nbytes=nbytes)
        change(header, changes).pack_into(self.pushed.header)

    def push(self, step: int, **changes: int) -> None:
        self.header(Kind.PUSH, step, **changes)
        self.end.push()

    def push_empty(self, step: int) -> None:
        self.header(Kind.PUSH, step, nbytes=0)
        self.end.push(empty=True)

    def leave(self, step: int) -> None:
        self.header(Kind.LEAVE, step)
        assert self.end.leave(LONG)
        self.end.close()
