"""What every transport refuses or gives up, and in which words, as clauses that each of three ranks runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from stalempi.errors import ProtocolError, StallError
from stalempi.transport.base import Transport
from stalempi.transport.message import Kind

from .ends import GRADIENT, LONG, PARAMETERS, RANKS, Server, Worker, parameters

AGREED = sum(GRADIENT)

# What a refusal leaves behind still receives: its buffers must outlive it.
_kept: list[object] = []


def a_wait_ends_at_its_deadline(transport: Transport) -> None:
    if transport.rank == 0:
        server = Server(transport)
        server.await_messages(RANKS - 1)
        assert server.end.receive(0.05) == []
        transport.allgather(b"", LONG)
        for worker in range(RANKS - 1):
            server.release(worker, parameters(1), step=1)
        server.await_leaves()
        return
    worker_end = Worker(transport)
    worker_end.push(1)
    began = time.monotonic()
    assert not worker_end.end.receive(0.05)
    assert 0.05 <= time.monotonic() - began < LONG / 2
    transport.allgather(b"", LONG)
    assert worker_end.end.receive(LONG)
    worker_end.leave(1)


def a_rank_that_never_comes_is_named(transport: Transport) -> None:
    if transport.rank == 2:
        return
    said = r"2 did not join" if transport.rank == 0 else r"rank"
    with pytest.raises(StallError, match=said):
        transport.allgather(b"", 1.0)


def a_broadcast_that_nobody_sends_is_given_up(transport: Transport) -> None:
    if transport.rank == 1:
        with pytest.raises(StallError, match="rank"):
            transport.broadcast(parameters(0), 0.2)


def a_sum_that_a_rank_does_not_join_is_given_up(transport: Transport) -> None:
    if transport.rank != 2:
        with pytest.raises(StallError, match=r"in a sum|2 did not join"):
            transport.allreduce(np.zeros(3), "sum", 0.2)


def a_push_of_another_sender_is_refused(transport: Transport) -> None:
    _push_refused(transport, "from rank 1, got PUSH of rank 9", sender=9)


def a_push_of_another_kind_is_refused(transport: Transport) -> None:
    _push_refused(transport, "expected PUSH or LEAVE from rank 1, got RELEASE", kind=Kind.RELEASE)


def a_push_that_announces_other_bytes_is_refused(transport: Transport) -> None:
    _push_refused(transport, f"announces 12 bytes, {AGREED} arrived", nbytes=12)


def a_push_that_announces_nothing_and_brings_something_is_refused(transport: Transport) -> None:
    _push_refused(transport, f"announces 0 bytes, {AGREED} arrived", nbytes=0)


def a_push_that_brings_too_little_is_refused(transport: Transport) -> None:
    sizes = (GRADIENT[0] - 8, GRADIENT[1])
    _push_refused(transport, f"announces {AGREED} bytes, {AGREED - 8} arrived", sizes, nbytes=AGREED)


def a_push_that_brings_too_much_is_refused(transport: Transport) -> None:
    sizes = (GRADIENT[0] + 8, GRADIENT[1])
    _push_refused(transport, "rank 1", sizes, nbytes=AGREED)


def a_release_of_another_sender_is_refused(transport: Transport) -> None:
    _release_refused(transport, "from rank 0, got RELEASE of rank 9", sender=9)


def a_release_of_another_kind_is_refused(transport: Transport) -> None:
    _release_refused(transport, "expected RELEASE from rank 0, got PUSH", kind=Kind.PUSH)


def a_release_that_announces_other_bytes_is_refused(transport: Transport) -> None:
    _release_refused(transport, f"announces 12 bytes, {sum(PARAMETERS)} arrived", nbytes=12)


def _push_refused(transport: Transport, said: str, sizes: tuple[int, ...] = GRADIENT, **changes: int) -> None:
    """Lets rank 1 push what its header does not announce, while rank 2 pushes as agreed."""
    if transport.rank == 0:
        server = Server(transport)
        _kept.append(server)
        with pytest.raises(ProtocolError, match=said):
            server.await_messages(RANKS - 1)
    elif transport.rank == 1:
        worker = Worker(transport, sizes=sizes)
        _kept.append(worker)
        worker.push(1, **changes)
    else:
        worker = Worker(transport)
        _kept.append(worker)
        worker.push(1)
    transport.allgather(b"", LONG)


def _release_refused(transport: Transport, said: str, **changes: int) -> None:
    """Lets the server release rank 1 with what its header does not announce."""
    if transport.rank == 0:
        server, parts = Server(transport), parameters(2)
        _kept.extend((server, parts))
        assert server.await_messages(1) == [0]
        server.release(0, parts, step=1, changes=changes)
    elif transport.rank == 1:
        worker = Worker(transport)
        _kept.append(worker)
        worker.push(1)
        with pytest.raises(ProtocolError, match=said):
            worker.end.receive(LONG)
    transport.allgather(b"", LONG)


# The refusals come last: they leave messages behind, as a job that ends does.
REFUSED: list[Callable[[Transport], None]] = [
    a_wait_ends_at_its_deadline,
    a_rank_that_never_comes_is_named,
    a_broadcast_that_nobody_sends_is_given_up,
    a_sum_that_a_rank_does_not_join_is_given_up,
    a_push_of_another_sender_is_refused,
    a_push_of_another_kind_is_refused,
    a_push_that_announces_other_bytes_is_refused,
    a_push_that_announces_nothing_and_brings_something_is_refused,
    a_push_that_brings_too_little_is_refused,
    a_push_that_brings_too_much_is_refused,
    a_release_of_another_sender_is_refused,
    a_release_of_another_kind_is_refused,
    a_release_that_announces_other_bytes_is_refused,
]
