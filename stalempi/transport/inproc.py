"""Moves messages between threads of one process: the twin of the MPI transport, for tests and simulation."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from stalempi.errors import StallError
from stalempi.pipeline.link import Lane, Links, LocalLink, Receiver, Sender
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
from stalempi.transport.meetings import InprocPeerEnd, Meetings
from stalempi.transport.message import Kind

__all__ = ["InprocTransport", "run_ranks"]

T = TypeVar("T")
_OPERATIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum}


@dataclass
class _Hub:
    """What the ranks of one in-process job share."""

    size: int
    delivery: float  # seconds after which a release that was sent is read from the server's memory
    barrier: threading.Barrier = field(init=False)
    here: set[int] = field(default_factory=set)  # ranks at the barrier
    gathered: list[bytes] = field(init=False)
    source: Parts | None = None
    wires: dict[tuple[int, int], _Pair] = field(default_factory=dict)  # by the ranks of worker and server
    links: dict[tuple[int, int, Lane], LocalLink] = field(default_factory=dict)
    meetings: Meetings = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, action=self.here.clear)
        self.gathered = [b""] * self.size
        self.meetings = Meetings(self.size)

    def pair(self, worker: int, server: int) -> _Pair:
        with self.lock:
            return self.wires.setdefault((worker, server), _Pair())

    def link(self, sender: int, receiver: int, lane: Lane) -> LocalLink:
        with self.lock:
            return self.links.setdefault((sender, receiver, lane), LocalLink(f"rank {sender}"))


@dataclass
class _Pair:
    """What is between a worker and a server; the server opens it."""

    opened: threading.Event = field(default_factory=threading.Event)
    push: Packet | None = None  # where pushes arrive
    to_server: queue.SimpleQueue[tuple[int, int]] | None = None
    to_worker: queue.SimpleQueue[_Release] = field(default_factory=queue.SimpleQueue)


@dataclass
class _Release:
    """A release on its way: the worker reads the server's memory when it arrives, as a network card would."""

    header: bytes
    parts: Parts | None
    due: float
    done: threading.Event = field(default_factory=threading.Event)


class InprocTransport(Transport, Links):
    """One rank of an in-process job; make all of them with `group`."""

    description = "in process"

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self.rank = rank
        self.size = hub.size

    @classmethod
    def group(cls, size: int, *, delivery: float = 0.0) -> list[InprocTransport]:
        """Makes `size` ranks that know each other; a release is read `delivery` seconds after it was sent."""
        hub = _Hub(size, delivery)
        return [cls(hub, rank) for rank in range(size)]

    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        self._hub.gathered[self.rank] = data
        self._meet(timeout)
        everything = list(self._hub.gathered)
        self._meet(timeout)
        return everything

    def allreduce(self, values: Numbers, op: str, timeout: float) -> None:
        everything = [np.frombuffer(data, values.dtype) for data in self.allgather(values.tobytes(), timeout)]
        values[...] = functools.reduce(_OPERATIONS[op], everything).reshape(values.shape)

    def broadcast(self, parts: Parts, timeout: float, root: int = 0) -> None:
        if self.rank == root:
            parts.stage_out()
            self._hub.source = parts
        self._meet(timeout)
        if self.rank != root:
            assert self._hub.source is not None
            _copy(self._hub.source.wire, parts)
            parts.stage_in()
        self._meet(timeout)

    def _meet(self, timeout: float) -> None:
        self._hub.here.add(self.rank)
        try:
            self._hub.barrier.wait(timeout)
        except threading.BrokenBarrierError:
            missing = ", ".join(str(rank) for rank in range(self.size) if rank not in self._hub.here)
            raise StallError(f"rank(s) {missing} did not join within {timeout:g} s") from None

    def server_end(
        self, pushes: Sequence[Packet], releases: Sequence[bytearray], workers: Sequence[int] | None = None
    ) -> ServerEnd:
        ranks = workers or range(1, 1 + len(pushes))
        pairs = [self._hub.pair(rank, self.rank) for rank in ranks]
        end = _InprocServerEnd(self._hub.delivery, ranks, pairs, releases)
        for pair, push in zip(pairs, pushes, strict=True):
            pair.push, pair.to_server = push, end.arriving
            pair.opened.set()
        return end

    def worker_end(self, push: Packet, release: Packet, server: int = 0, *, thread: bool = False) -> WorkerEnd:
        del thread
        pair = self._hub.pair(self.rank, server)
        pair.opened.wait(60)
        return _InprocWorkerEnd(pair, (self.rank, server), push, release)

    def peer_end(self, ticket: bytearray, tickets: bytearray, sums: Sequence[Tensor]) -> PeerEnd:
        return InprocPeerEnd(self._hub.meetings, self.rank, (ticket, tickets), sums)

    def sender(self, rank: int, lane: Lane, depth: int, *, timeout: float) -> Sender:
        del depth, timeout
        return self._hub.link(self.rank, rank, lane)

    def receiver(self, rank: int, lane: Lane, depth: int, *, timeout: float, device: torch.device) -> Receiver:
        del depth, device
        link = self._hub.link(rank, self.rank, lane)
        link.timeout = timeout
        return link

    def progress(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class _InprocServerEnd(ServerEnd):
    def __init__(
        self, delivery: float, workers: Sequence[int], pairs: Sequence[_Pair], releases: Sequence[bytearray]
    ) -> None:
        self._delivery, self._workers, self._pairs, self._releases = delivery, workers, pairs, releases
        self.arriving: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._on_way: list[_Release] = []

    def receive(self, timeout: float) -> list[int]:
        found: list[tuple[int, int]] = []
        try:
            found.append(self.arriving.get(timeout=timeout))
            while True:
                found.append(self.arriving.get_nowait())
        except queue.Empty:
            pass
        for rank, arrived in found:
            packet = self._pairs[self._workers.index(rank)].push
            assert packet is not None, "it was opened here"
            check_received(packet, sender=rank, kinds=(Kind.PUSH, Kind.LEAVE), arrived=arrived)
            if arrived:
                packet.parts.stage_in()
        return [self._workers.index(rank) for rank, _ in found]

    def release(self, worker: int, parts: Parts, *, empty: bool = False) -> None:
        if not empty:
            parts.stage_out()
        sent = _Release(bytes(self._releases[worker]), None if empty else parts, time.monotonic() + self._delivery)
        self._on_way.append(sent)
        self._pairs[worker].to_worker.put(sent)

    def announce(self, worker: int) -> None:
        pass  # what is read at once goes at once, with the last part

    def send(self, worker: int, parts: Parts, place: int) -> None:
        if place == len(parts.wire) - 1:
            self.release(worker, parts)

    def settle(self, parts: Parts, timeout: float) -> bool:
        until = time.monotonic() + timeout
        for sent in self._on_way:
            if sent.parts is parts:
                sent.done.wait(max(0.0, until - time.monotonic()))
        self._on_way = [sent for sent in self._on_way if not sent.done.is_set()]
        return all(sent.parts is not parts for sent in self._on_way)

    def close(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        if not all(sent.done.wait(max(0.0, until - time.monotonic())) for sent in self._on_way):
            raise StallError(f"a release was not received within {timeout:g} s")


class _InprocWorkerEnd(PartwiseEnd):
    def __init__(self, pair: _Pair, between: tuple[int, int], push: Packet, release: Packet) -> None:
        self._pair, self._push, self._release = pair, push, release
        self._rank, self._server = between
        self._ahead: list[Tensor] = []  # copies of the parts that went ahead of the push
        self._sent: _Release | None = None  # the release of which the header has been read
        self._here = self._arrived = 0  # parts of it that have been read, and their bytes

    def part(self, place: int) -> None:
        assert place == len(self._ahead), "parts go in their order"
        self._push.parts.start(place).synchronize()
        self._ahead.append(self._push.parts.wire[place].clone())
        self.ahead_bytes += self._ahead[-1].nbytes

    def progress(self) -> None:
        pass

    def push(self, *, empty: bool = False) -> None:
        assert not (empty and self._ahead), "an empty push has no part that could go ahead"
        parts = self._push.parts
        self.hidden = sum(part.nbytes for part in self._ahead) / max(1, parts.nbytes)
        for _ in () if empty else parts.outgoing(len(self._ahead)):
            pass
        self._send([] if empty else [*self._ahead, *map(parts.sent, range(len(self._ahead), len(parts.wire)))])
        self._ahead.clear()
        self.ahead_bytes = 0

    def leave(self, timeout: float) -> bool:
        self._send([*self._ahead, *(part[:0] for part in self._push.parts.wire[len(self._ahead) :])])
        return True

    def _send(self, wire: Sequence[Tensor]) -> None:
        target, arriving = self._pair.push, self._pair.to_server
        assert target is not None, "the server has opened it"
        assert arriving is not None, "the server has opened it"
        target.header[:] = self._push.header
        arriving.put((self._rank, _copy(wire, target.parts)))

    def receive(self, timeout: float) -> bool:
        if not (self._sent or self.receive_header(timeout)):
            return False
        sent, first, parts = self._sent, self._here, self._release.parts
        assert sent is not None, "its header has been read"
        self._read(len(sent.parts.wire) if sent.parts else 0)
        sent.done.set()
        self._sent = None
        check_received(self._release, sender=self._server, kinds=(Kind.RELEASE,), arrived=self._arrived)
        if self._arrived:
            parts.stage_in(first)
        return True

    def receive_header(self, timeout: float) -> bool:
        try:
            self._sent = sent = self._pair.to_worker.get(timeout=timeout)
        except queue.Empty:
            return False
        time.sleep(max(0.0, sent.due - time.monotonic()))
        self._release.header[:] = sent.header
        self._here = self._arrived = 0
        return True

    def receive_part(self, place: int, timeout: float) -> bool:
        del timeout
        first = self._here
        self._read(place + 1)
        self._release.parts.stage_in(first, self._here)
        return True

    def _read(self, stop: int) -> None:
        while self._here < stop:
            assert self._sent is not None, "its header has been read"
            assert self._sent.parts is not None, "it has parts"
            self._arrived += _copy_part(self._sent.parts.wire[self._here], self._release.parts.wire[self._here])
            self._here += 1

    def close(self) -> None:
        pass


def run_ranks(main: Callable[[InprocTransport], T], size: int, *, delivery: float = 0.0) -> list[T]:
    """Runs `main` once per rank, each in a thread of its own, and returns what each returned.

    The first exception is raised again once every rank has ended or met the broken barrier.
    """
    transports = InprocTransport.group(size, delivery=delivery)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(main, transport) for transport in transports]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in futures if future in done and future.exception() is not None]
        if failed:
            transports[0]._hub.barrier.abort()
            error = failed[0].exception()
            assert error is not None
            raise error
        return [future.result() for future in futures]


def _copy(source: Sequence[Tensor], target: Parts) -> int:
    """Copies what fits, as a network would, and returns the bytes that came; of parts sent empty there are none."""
    return sum(_copy_part(a, b) for a, b in zip(source, target.wire, strict=bool(source)))


def _copy_part(source: Tensor, target: Tensor) -> int:
    fits = min(source.numel(), target.numel())
    target[:fits].copy_(source[:fits])
    return source.nbytes
