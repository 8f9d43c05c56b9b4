"""What every transport promises, as functions that each of three ranks runs; as a program, it runs them on MPI."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stalempi.errors import ProtocolError
from stalempi.transport.base import Packet, Parts, ServerEnd, Transport, WorkerEnd
from stalempi.transport.message import HEADER_BYTES, Header, Kind

RANKS = 3
LONG = 30.0

# What a refusal leaves behind still receives: its buffers must outlive it.
_kept: list[object] = []


def payload(*sizes: int) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


class Server:
    """A server's end with packets of its own."""

    def __init__(self, transport: Transport, *, staged: bool, sizes: tuple[int, ...]) -> None:
        self.pushes = [
            Packet(HEADER_BYTES + 8, Parts(payload(*sizes), staged=staged)) for _ in range(transport.size - 1)
        ]
        self.headers = [bytearray(HEADER_BYTES) for _ in self.pushes]
        self.end: ServerEnd = transport.server_end(self.pushes, self.headers)

    def await_messages(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            arrived = self.end.receive(LONG)
            assert arrived, "nothing came"
            found += arrived
        return sorted(found)

    def release(self, worker: int, parts: Parts, *, step: int, empty: bool = False) -> None:
        header = Header(Kind.RELEASE, sender=0, layout=1, step=step, nbytes=0 if empty else parts.nbytes)
        header.pack_into(self.headers[worker])
        self.end.release(worker, parts, empty=empty)


class Worker:
    """A worker's end with packets of its own."""

    def __init__(
        self, transport: Transport, *, staged: bool = False, sizes: tuple[int, ...] = (300_000, 7), back: int = 200_000
    ) -> None:
        self.rank = transport.rank
        self.push_packet = Packet(HEADER_BYTES + 8, Parts(payload(*sizes), staged=staged))
        self.release_packet = Packet(HEADER_BYTES, Parts(payload(back), staged=staged))
        self.end: WorkerEnd = transport.worker_end(self.push_packet, self.release_packet)

    def header(self, kind: Kind, step: int, **changes: int) -> None:
        nbytes = self.push_packet.parts.nbytes if kind is Kind.PUSH else 0
        header = Header(kind, sender=self.rank, layout=1, step=step, nbytes=nbytes)
        for name, value in changes.items():
            setattr(header, name, value)
        header.pack_into(self.push_packet.header)

    def push(self, step: int, **changes: int) -> None:
        self.header(Kind.PUSH, step, **changes)
        self.end.push()

    def leave(self, step: int) -> None:
        self.header(Kind.LEAVE, step)
        assert self.end.leave(LONG)
        self.end.close()


def everybody_gets_what_everybody_gave(transport: Transport) -> None:
    given = [b"", b"one", b"x" * 100_000]
    assert transport.allgather(given[transport.rank], LONG) == given


def a_broadcast_brings_the_servers_bytes_to_all(transport: Transport) -> None:
    tensors = payload(5, 1_000_000)
    if transport.rank == 0:
        for number, tensor in enumerate(tensors):
            tensor.fill_(number + 3)
    transport.broadcast(Parts(tensors), LONG)
    assert [int(t[-1]) for t in tensors] == [3, 4]


def pushes_and_releases_carry_what_was_put_in(transport: Transport, *, staged: bool = False) -> None:
    steps = 20
    if transport.rank == 0:
        server = Server(transport, staged=staged, sizes=(300_000, 7))
        parts = Parts(payload(200_000), staged=staged)
        for step in range(1, steps + 1):
            for worker in server.await_messages(RANKS - 1):
                big, small = server.pushes[worker].parts.tensors
                assert int(big[0]) == int(big[-1]) == step
                assert int(small[0]) == worker
                assert server.pushes[worker].header[-1] == step
            assert server.end.settle(parts, LONG)
            parts.tensors[0].fill_(100 + step)
            for worker in range(RANKS - 1):
                server.release(worker, parts, step=step)
        server.await_messages(RANKS - 1)
        server.end.close(LONG)
        return
    worker_end = Worker(transport, staged=staged)
    for step in range(1, steps + 1):
        worker_end.push_packet.parts.tensors[0].fill_(step)
        worker_end.push_packet.parts.tensors[1].fill_(transport.rank - 1)
        worker_end.push_packet.header[-1] = step
        worker_end.push(step)
        assert worker_end.end.receive(LONG)
        assert Header.unpack(worker_end.release_packet.header).step == step
        assert set(worker_end.release_packet.parts.tensors[0].tolist()) == {100 + step}
    worker_end.leave(steps)


def staged_parts_travel_as_direct_ones_do(transport: Transport) -> None:
    pushes_and_releases_carry_what_was_put_in(transport, staged=True)


def a_worker_is_answered_while_another_is_silent(transport: Transport) -> None:
    if transport.rank == 0:
        server, parts = Server(transport, staged=False, sizes=(300_000, 7)), Parts(payload(200_000))
        for step in range(1, 4):
            assert server.await_messages(1) == [0]
            server.release(0, parts, step=step)
        assert server.await_messages(2) == [0, 1]
        server.end.close(LONG)
        return
    worker = Worker(transport)
    if transport.rank == 1:
        for step in range(1, 4):
            worker.push(step)
            assert worker.end.receive(LONG)
    else:
        time.sleep(0.5)
    worker.leave(3)


def an_empty_release_and_an_empty_push_change_nothing(transport: Transport) -> None:
    if transport.rank == 0:
        server, parts = Server(transport, staged=False, sizes=(300_000, 7)), Parts(payload(200_000))
        parts.tensors[0].fill_(5)
        for step in range(1, 5):
            for worker in server.await_messages(RANKS - 1):
                server.release(worker, parts, step=step, empty=step % 2 == 1)
        server.await_messages(RANKS - 1)
        server.end.close(LONG)
        return
    worker_end = Worker(transport)
    worker_end.release_packet.parts.tensors[0].fill_(9)
    for step in range(1, 5):
        worker_end.push(step)
        assert worker_end.end.receive(LONG)
        assert int(worker_end.release_packet.parts.tensors[0][0]) == (9 if step == 1 else 5)
    worker_end.leave(4)


def a_wait_ends_at_its_deadline(transport: Transport) -> None:
    if transport.rank == 0:
        server = Server(transport, staged=False, sizes=(300_000, 7))
        server.await_messages(RANKS - 1)
        time.sleep(0.4)
        parts = Parts(payload(200_000))
        for worker in range(RANKS - 1):
            server.release(worker, parts, step=1)
        server.await_messages(RANKS - 1)
        assert server.end.receive(0.05) == []
        server.end.close(LONG)
        return
    worker_end = Worker(transport)
    worker_end.push(1)
    assert not worker_end.end.receive(0.05)
    assert worker_end.end.receive(LONG)
    worker_end.leave(1)


def a_message_of_another_sender_is_refused(transport: Transport) -> None:
    _refused(transport, "PUSH of rank 9", sender=9)


def a_header_that_announces_other_bytes_is_refused(transport: Transport) -> None:
    _refused(transport, "announces 12 bytes", nbytes=12)


def _refused(transport: Transport, said: str, **changes: int) -> None:
    if transport.rank == 0:
        server = Server(transport, staged=False, sizes=(300_000, 7))
        _kept.append(server)
        with pytest.raises(ProtocolError, match=said):
            server.await_messages(RANKS - 1)
        transport.allgather(b"", LONG)
        return
    worker = Worker(transport)
    _kept.append(worker)
    worker.push(1, **(changes if transport.rank == 1 else {}))
    transport.allgather(b"", LONG)


# The refusals come last: they leave messages behind, as a job that ends does.
CONTRACT: list[Callable[[Transport], None]] = [
    everybody_gets_what_everybody_gave,
    a_broadcast_brings_the_servers_bytes_to_all,
    pushes_and_releases_carry_what_was_put_in,
    staged_parts_travel_as_direct_ones_do,
    a_worker_is_answered_while_another_is_silent,
    an_empty_release_and_an_empty_push_change_nothing,
    a_wait_ends_at_its_deadline,
    a_message_of_another_sender_is_refused,
    a_header_that_announces_other_bytes_is_refused,
]


def main() -> None:
    """Runs the contract on this rank of an MPI job, each clause on a communicator of its own."""
    from mpi4py import MPI  # noqa: PLC0415 - the in-process twin does without

    from stalempi import abort  # noqa: PLC0415
    from stalempi.transport.mpi import MpiTransport  # noqa: PLC0415

    abort.install()
    for clause in CONTRACT:
        clause(MpiTransport(MPI.COMM_WORLD.Dup()))
        if MPI.COMM_WORLD.rank == 0:
            sys.stdout.write(f"{clause.__name__}\n")
            sys.stdout.flush()
    MPI.COMM_WORLD.Barrier()
    sys.stdout.flush()
    import os  # noqa: PLC0415

    if MPI.COMM_WORLD.rank == 0:
        time.sleep(0.3)
    os._exit(0)  # requests that the refusals left behind would keep MPI_Finalize waiting


if __name__ == "__main__":
    main()
