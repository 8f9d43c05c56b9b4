"""Moves messages between ranks by nonblocking MPI."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TypeAlias, cast

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from stalempi.errors import ProtocolError, StallError
from stalempi.flat import MAX_BUCKET_BYTES
from stalempi.pipeline.link import Lane, Links, Receiver, Sender
from stalempi.transport.backoff import wait_for
from stalempi.transport.base import (
    Numbers,
    Packet,
    Parts,
    PartwiseEnd,
    PeerEnd,
    ServerEnd,
    Transport,
    WorkerEnd,
    check_received,
)
from stalempi.transport.collective import MpiPeerEnd
from stalempi.transport.links import MpiReceiver, MpiSender, Progress
from stalempi.transport.message import Kind, Tag
from stalempi.transport.staging import CopyQueue

__all__ = ["MpiTransport"]

Requests: TypeAlias = list[MPI.Request]
SERVER = 0
MAX_MESSAGE_BYTES = MAX_BUCKET_BYTES
_OPERATIONS = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
_EMPTY = np.empty(0, dtype=np.uint8)
# MPICH 5.0 forgets how much a persistent receive has brought once Get_status was asked; its kin may, too.
_MAY_ASK = MPI.get_vendor()[0] == "Open MPI"


class MpiTransport(Transport, Links):
    """One rank of an MPI job.

    Args:
        comm: a communicator that nobody else uses.
        first: rank in the job of this communicator's rank 0, where it holds a part of the job; for messages.
    """

    def __init__(self, comm: MPI.Intracomm, first: int = 0) -> None:
        self._comm, self._first = comm, first
        self._given_up: list[object] = []  # MPI may still write there
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.description = MPI.Get_library_version().split("\n", maxsplit=1)[0].split(",")[0].strip("\x00 ")

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        if self.rank == SERVER:
            everything = self._gather(data, timeout)
            sizes = np.array([len(item) for item in everything], dtype=np.int64)
            for rank in range(1, self.size):
                self._send_bytes(sizes.tobytes() + b"".join(everything), rank, timeout)
            return everything
        self._send_bytes(data, SERVER, timeout)
        joined = self._receive_bytes(SERVER, 2 * timeout)  # rank 0 speaks first: it knows who is missing
        sizes = np.frombuffer(joined, dtype=np.int64, count=self.size)
        edges = (sizes.nbytes + np.cumsum([0, *sizes])).tolist()
        return [joined[start:end] for start, end in itertools.pairwise(edges)]

    def _gather(self, data: bytes, timeout: float) -> list[bytes]:
        sizes = np.zeros((self.size, 1), dtype=np.int64)
        requests = [self._comm.Irecv(sizes[rank], source=rank, tag=Tag.STATE) for rank in range(1, self.size)]
        statuses = [False] * len(requests)

        def all_here() -> bool:
            statuses[:] = [here or bool(r.Test()) for here, r in zip(statuses, requests, strict=True)]
            return all(statuses)

        if not wait_for(all_here, timeout):
            missing = [str(rank) for rank, here in enumerate(statuses, start=self._first + 1) if not here]
            raise StallError(
                f"rank(s) {', '.join(missing)} did not join within {timeout:g} s: every rank must construct the same "
                "DistributedOptimizer, and call the same collectives, in the same order"
            )
        return [data, *(self._receive_body(int(sizes[rank, 0]), rank, timeout) for rank in range(1, self.size))]

    def _send_bytes(self, data: bytes, rank: int, timeout: float) -> None:
        size = np.array([len(data)], dtype=np.int64)
        pieces = _pieces(np.frombuffer(data, dtype=np.uint8))
        requests = [self._comm.Isend(b, dest=rank, tag=Tag.STATE) for b in (size, *pieces)]
        self._complete(requests, rank, timeout)

    def _receive_bytes(self, rank: int, timeout: float) -> bytes:
        size = np.zeros(1, dtype=np.int64)
        self._complete([self._comm.Irecv(size, source=rank, tag=Tag.STATE)], rank, timeout)
        return self._receive_body(int(size[0]), rank, timeout)

    def _receive_body(self, size: int, rank: int, timeout: float) -> bytes:
        body = np.empty(size, dtype=np.uint8)
        requests = [self._comm.Irecv(piece, source=rank, tag=Tag.STATE) for piece in _pieces(body)]
        self._complete(requests, rank, timeout)
        return body.tobytes()

    def broadcast(self, parts: Parts, timeout: float, root: int = 0) -> None:
        if self.rank != root:
            parts.make_room()
            requests = [self._comm.Irecv(part, source=root, tag=Tag.STATE) for part in parts.wire]
            self._complete(requests, root, timeout)
            parts.stage_in()
            return
        parts.stage_out()
        for rank in range(self.size):
            if rank != root:
                sends = [self._comm.Isend(part, dest=rank, tag=Tag.STATE) for part in parts.wire]
                self._complete(sends, rank, timeout)

    def allreduce(self, values: Numbers, op: str, timeout: float) -> None:
        request = self._comm.Iallreduce(MPI.IN_PLACE, values, op=_OPERATIONS[op])
        if not wait_for(lambda: bool(request.Test()), timeout):
            self._given_up.append((request, values))
            raise StallError(
                f"rank {self._first + self.rank} waited {timeout:g} s in a sum: a rank is stuck or elsewhere"
            )

    def _complete(self, requests: Requests, rank: int, timeout: float) -> None:
        if not wait_for(lambda: bool(MPI.Request.Testall(requests)), timeout):
            self._given_up.append(requests)
            ours, theirs = self._first + self.rank, self._first + rank
            raise StallError(f"rank {ours} waited {timeout:g} s for rank {theirs}: it is stuck or elsewhere")

    def server_end(
        self, pushes: Sequence[Packet], releases: Sequence[bytearray], workers: Sequence[int] | None = None
    ) -> ServerEnd:
        return _MpiServerEnd(self._comm, pushes, releases, workers or range(1, 1 + len(pushes)))

    def worker_end(self, push: Packet, release: Packet, server: int = SERVER, *, thread: bool = False) -> WorkerEnd:
        may_call = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        return _MpiWorkerEnd(self._comm, push, release, server, self._links if thread and may_call else None)

    def peer_end(self, ticket: bytearray, tickets: bytearray, sums: Sequence[Tensor]) -> PeerEnd:
        return MpiPeerEnd(self._comm, ticket, tickets, sums)

    def sender(self, rank: int, lane: Lane, depth: int, *, timeout: float) -> Sender:
        return MpiSender(self._comm, rank, lane, depth, progress=self._links, timeout=timeout)

    def receiver(self, rank: int, lane: Lane, depth: int, *, timeout: float, device: torch.device) -> Receiver:
        return MpiReceiver(self._comm, rank, lane, depth, progress=self._links, timeout=timeout, device=device)

    def progress(self) -> AbstractContextManager[None]:
        return self._links.running()

    @cached_property
    def _links(self) -> Progress:
        return Progress(self._comm)

    def close(self) -> None:
        self._comm.Free()


class _MpiWorkerEnd(PartwiseEnd):
    """Sends a push's parts with persistent requests, in their order, and its header once the last of them may go.

    Args:
        progress: moves what is on its way from a thread, from the first part that goes ahead to the push; None: only
            the calls of `progress` do.
    """

    def __init__(
        self, comm: MPI.Intracomm, push: Packet, release: Packet, server: int, progress: Progress | None = None
    ) -> None:
        self._comm, self._push, self._release, self._server = comm, push, release, server
        self._progress = progress
        self._lock = progress.lock if progress else nullcontext()
        self._sends: Requests = [comm.Send_init(push.header, server, Tag.PUSH_HEADER)]
        self._sends += [comm.Send_init(part, server, Tag.PUSH_PART) for part in push.parts.wire]
        self._header: MPI.Request = comm.Recv_init(release.header, server, Tag.RELEASE_HEADER)
        self._parts: Requests = [comm.Recv_init(part, server, Tag.RELEASE_PART) for part in release.parts.wire]
        self._statuses = [MPI.Status() for _ in self._parts]
        self._going = self._sends
        self._sent = self._begun = False
        self._here = self._arrived = 0  # parts of the release that `receive_part` has taken, and their bytes
        self._ahead = 0  # parts that went ahead of the push
        self._copying = CopyQueue(lambda place: _start([self._sends[1 + place]]))

    def part(self, place: int) -> None:
        assert place == self._ahead, "parts go in their order"
        if self._progress and not place:
            self._progress.start()
        self._ahead += 1
        self.ahead_bytes += self._push.parts.wire[place].nbytes
        with self._lock:
            self._copying.add(place, self._push.parts.start(place))
            self._copying.launch()

    def progress(self) -> None:
        with self._lock:
            self._copying.launch()
            self._comm.Iprobe(MPI.ANY_SOURCE, Tag.NOBODY)

    def push(self, *, empty: bool = False) -> None:
        assert not (empty and self._ahead), "an empty push has no part that could go ahead"
        self._stop_progress()
        self.hidden = self._share_gone() if self._ahead else 0.0
        self._release.parts.make_room()
        _start([self._header, *self._parts])
        self._sent = self._begun = False
        self._here = self._arrived = 0
        header, *parts = self._sends
        self._copying.launch(wait=True)
        _start([header])
        self._going = [header, *self._send_empty_parts()] if empty else self._sends
        for place in () if empty else self._push.parts.outgoing(self._ahead):
            if place in self._push.parts.lengths:  # not always as long, so no persistent request fits
                sent = self._push.parts.sent(place)
                self._going = [*self._going, self._comm.Isend(sent, self._server, Tag.PUSH_PART)]
            else:
                _start([parts[place]])
        self._ahead = self.ahead_bytes = 0

    def _stop_progress(self) -> None:
        if self._progress and self._ahead:
            self._progress.stop()

    def _share_gone(self) -> float:
        parts = self._push.parts
        gone = sum(parts.wire[place].nbytes for place in range(self._ahead) if self._sends[1 + place].Test())
        return gone / parts.nbytes

    def receive(self, timeout: float) -> bool:
        if not wait_for(self._is_whole, timeout, lambda: self._begun or not self._sent):
            return False
        arrived = self._arrived + sum(status.Get_count(MPI.BYTE) for status in self._statuses[self._here :])
        check_received(self._release, sender=self._server, kinds=(Kind.RELEASE,), arrived=arrived)
        if arrived:
            self._release.parts.stage_in(self._here)
        return True

    def receive_header(self, timeout: float) -> bool:
        return wait_for(self._has_begun, timeout, lambda: not self._sent)

    def receive_part(self, place: int, timeout: float) -> bool:
        first = self._here
        if not wait_for(lambda: self._has_parts(place), timeout, lambda: True):
            return False
        self._release.parts.stage_in(first, self._here)
        return True

    def _has_begun(self) -> bool:
        self._sent = self._sent or (self._going[-1].Get_status() and bool(MPI.Request.Testall(self._going)))
        self._begun = self._begun or bool(self._header.Test())
        return self._sent and self._begun

    def _has_parts(self, place: int) -> bool:
        while self._here <= place:
            part = slice(self._here, self._here + 1)
            if not _all_here(self._parts[part], self._statuses[part], self._server):
                return False
            self._arrived += self._statuses[self._here].Get_count(MPI.BYTE)
            self._here += 1
        return True

    def _is_whole(self) -> bool:
        return self._has_begun() and _all_here(self._parts[self._here :], self._statuses[self._here :], self._server)

    def leave(self, timeout: float) -> bool:
        self._stop_progress()
        self._copying.launch(wait=True)
        requests = [self._comm.Isend(self._push.header, self._server, Tag.PUSH_HEADER)]
        requests += [*self._sends[1 : 1 + self._ahead], *self._send_empty_parts(self._ahead)]
        return wait_for(lambda: bool(MPI.Request.Testall(requests)), timeout)

    def _send_empty_parts(self, first: int = 0) -> Requests:
        return [self._comm.Isend(_EMPTY, self._server, Tag.PUSH_PART) for _ in self._push.parts.wire[first:]]

    def close(self) -> None:
        for request in [*self._sends, self._header, *self._parts]:
            request.Free()


class _Outbox:
    """The release of one version of the parameters: for each worker (by rank), persistent sends of its parts."""

    def __init__(self, comm: MPI.Intracomm, parts: Parts) -> None:
        self._comm, self.parts = comm, parts
        self._sends: dict[int, Requests] = {}

    def to(self, rank: int) -> Requests:
        """Returns the sends to `rank`."""
        if rank not in self._sends:
            self._sends[rank] = [self._comm.Send_init(part, rank, Tag.RELEASE_PART) for part in self.parts.wire]
        return self._sends[rank]

    def all(self) -> Requests:
        """Returns the sends to every worker."""
        return [request for sends in self._sends.values() for request in sends]


class _MpiServerEnd(ServerEnd):
    """Polls one header receive per worker, and the parts only of those whose header is here."""

    def __init__(
        self, comm: MPI.Intracomm, pushes: Sequence[Packet], releases: Sequence[bytearray], ranks: Sequence[int]
    ) -> None:
        self._comm, self._pushes, self._ranks = comm, pushes, ranks
        self._headers: Requests = [
            comm.Recv_init(packet.header, rank, Tag.PUSH_HEADER) for rank, packet in zip(ranks, pushes, strict=True)
        ]
        self._parts: list[Requests] = [
            [comm.Recv_init(part, rank, Tag.PUSH_PART) for part in packet.parts.wire]
            for rank, packet in zip(ranks, pushes, strict=True)
        ]
        self._statuses = [[MPI.Status() for _ in parts] for parts in self._parts]
        self._half_here: set[int] = set()
        self._expected = set(
            range(len(pushes))
        )  # workers whose push may come, and of which not even the header is here
        self._release_headers: Requests = [
            comm.Send_init(header, rank, Tag.RELEASE_HEADER) for rank, header in zip(ranks, releases, strict=True)
        ]
        self._outboxes: dict[int, _Outbox] = {}
        self._empty: Requests = []
        for worker in range(len(pushes)):
            _start([self._headers[worker], *self._parts[worker]])

    def receive(self, timeout: float) -> list[int]:
        found: list[int] = []

        def poll() -> bool:
            found.extend(self._poll())
            return bool(found)

        wait_for(poll, timeout, self._is_half_here)
        return found

    def _is_half_here(self) -> bool:
        """Whether a push has begun to arrive; its parts may come while its header is still to be written."""
        if self._half_here or not _MAY_ASK:
            return bool(self._half_here)
        return any(self._parts[w] and self._parts[w][0].Get_status() for w in self._expected)

    def _poll(self) -> list[int]:
        begun = MPI.Request.Testsome(self._headers)
        if begun:
            self._half_here.update(begun)
            self._expected.difference_update(begun)
        if not self._half_here:
            return []
        whole = [w for w in sorted(self._half_here) if _all_here(self._parts[w], self._statuses[w], self._ranks[w])]
        for worker in whole:
            self._half_here.remove(worker)
            arrived = sum(status.Get_count(MPI.BYTE) for status in self._statuses[worker])
            packet = self._pushes[worker]
            check_received(packet, sender=self._ranks[worker], kinds=(Kind.PUSH, Kind.LEAVE), arrived=arrived)
            if arrived:
                packet.parts.stage_in()
        return whole

    def release(self, worker: int, parts: Parts, *, empty: bool = False) -> None:
        self.announce(worker)
        if empty:
            self._expect(worker)
            MPI.Request.Waitall(self._empty)  # tiny, and long gone
            self._empty = [self._comm.Isend(_EMPTY, self._ranks[worker], Tag.RELEASE_PART) for _ in parts.wire]
            return
        sends = self._begin(worker, parts)
        for place in parts.outgoing():
            self._send(worker, sends, place)

    def announce(self, worker: int) -> None:
        MPI.Request.Wait(self._release_headers[worker])
        _start([self._release_headers[worker]])

    def send(self, worker: int, parts: Parts, place: int) -> None:
        sends = self._outbox(parts).to(self._ranks[worker]) if place else self._begin(worker, parts)
        parts.start(place).synchronize()
        self._send(worker, sends, place)

    def _begin(self, worker: int, parts: Parts) -> Requests:
        """Returns the sends of a release; the last ones are over, for the worker has pushed since."""
        sends = self._outbox(parts).to(self._ranks[worker])
        MPI.Request.Waitall(sends)
        return sends

    def _send(self, worker: int, sends: Requests, place: int) -> None:
        if place == len(sends) - 1:
            self._expect(worker)
        _start([sends[place]])

    def _expect(self, worker: int) -> None:
        """Posts the receive of the worker's next push, which it may send once its release is whole."""
        self._pushes[worker].parts.make_room()
        _start([self._headers[worker], *self._parts[worker]])
        self._expected.add(worker)

    def _outbox(self, parts: Parts) -> _Outbox:
        if id(parts) not in self._outboxes:
            self._outboxes[id(parts)] = _Outbox(self._comm, parts)
        return self._outboxes[id(parts)]

    def settle(self, parts: Parts, timeout: float) -> bool:
        requests = self._outbox(parts).all()
        return wait_for(lambda: bool(MPI.Request.Testall(requests)), timeout, lambda: True)

    def close(self, timeout: float) -> None:
        sends = self._release_headers + [r for outbox in self._outboxes.values() for r in outbox.all()]
        if not wait_for(lambda: bool(MPI.Request.Testall(sends + self._empty)), timeout):
            raise StallError(f"a release was not received within {timeout:g} s")
        for request in [*sends, *self._headers, *(r for parts in self._parts for r in parts)]:
            request.Free()


def _pieces(data: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Cuts `data` into views that every MPI can count."""
    return [data[start : start + MAX_MESSAGE_BYTES] for start in range(0, len(data), MAX_MESSAGE_BYTES)]


def _start(requests: Requests) -> None:
    for request in requests:  # parts share a tag, so they match in this order; MPI_Startall may take any
        cast("MPI.Prequest", request).Start()


def _all_here(parts: Requests, statuses: list[MPI.Status], sender: int) -> bool:
    """Returns whether all `parts` have arrived; ProtocolError if one is larger than its place."""
    try:
        # asking for one lets all move on, and costs a tenth of asking for a hundred
        return (not (parts and _MAY_ASK) or parts[-1].Get_status()) and bool(MPI.Request.Testall(parts, statuses))
    except MPI.Exception:
        if all(MPI.Get_error_class(status.Get_error()) != MPI.ERR_TRUNCATE for status in statuses):
            raise
        raise ProtocolError(f"rank {sender} sent a part that is larger than agreed on") from None
