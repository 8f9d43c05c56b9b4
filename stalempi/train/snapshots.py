"""Takes snapshots of the server's model, and has them measured: by the evaluator rank at once, or after training.

server    snapshot ── release ──> evaluator     one memory copy, then sent while the server serves
figures <──── push ──── evaluator     once it has measured them, and is free for the next
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from stalempi import preempt
from stalempi.errors import StallError
from stalempi.flat import Flat
from stalempi.peer import Peer
from stalempi.replica import Replica
from stalempi.server import Server
from stalempi.train.evaluate import Point
from stalempi.train.evaluation import Evaluation
from stalempi.transport.base import Packet, Parts, Transport
from stalempi.transport.message import HEADER_BYTES, Flag, Header, Kind

__all__ = ["Album", "Critic", "Exhibition", "Gallery"]

WAITING = 2  # snapshots that wait for a busy evaluator, besides the one that it has


class _Snapshot:
    """A copy in host memory of the parameters and buffers of a model, which replicas hold by their server."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.seconds, self.samples = 0.0, 0
        self._replicas = replicas
        self._copies = [flat.like("cpu") for flat in self._theirs()]
        self.parts = Parts([b for copy in self._copies for b in copy.buckets(replicas[0].bucket_bytes)])

    def take(self, seconds: float, samples: int) -> None:
        """Makes it what the replica is now: one copy."""
        self.seconds, self.samples = seconds, samples
        self._copy(self._copies, self._theirs())

    def put_back(self) -> None:
        """Makes the replica what it was."""
        self._copy(self._theirs(), self._copies)

    def _theirs(self) -> list[Flat]:
        return _flats(self._replicas)

    @torch.no_grad()
    def _copy(self, targets: list[Flat], sources: list[Flat]) -> None:
        for target, source in zip(targets, sources, strict=True):
            for to, values in zip(target.storages, source.storages, strict=True):
                to.copy_(values)


def _flats(replicas: Sequence[Replica]) -> list[Flat]:
    return [*(replica.params for replica in replicas), replicas[0].buffers]


def _places(replicas: Sequence[Replica]) -> tuple[Packet, Packet, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Returns the evaluator's push and its release, and in their headers the figures, and the seconds of a snapshot."""
    figures = Packet(HEADER_BYTES + 16, Parts([]))
    buckets = [b for flat in _flats(replicas) for b in flat.buckets(replicas[0].bucket_bytes)]
    release = Packet(HEADER_BYTES + 8, Parts(buckets))
    measured, seconds = (np.frombuffer(p.header, np.float64, -1, HEADER_BYTES) for p in (figures, release))
    return figures, release, (measured, seconds)


class Gallery(ABC):
    """Takes snapshots of a server's model when they are due; of rank 0's where there is no server.

    Args:
        server: the server, or rank 0's side where there is none.
        evaluation: where the figures go.
        replicas: the model, by the server that holds each share of it.
    """

    def __init__(self, server: Server | Peer, evaluation: Evaluation, replicas: Sequence[Replica]) -> None:
        self._server, self._evaluation, self._replicas = server, evaluation, replicas

    def look(self, now: float) -> None:
        """Takes a snapshot if it is time for one at `now`, on the server's clock."""
        stats = self._server.stats
        if self._evaluation.is_due(now - stats.started, stats.samples):
            self._server.combine_buffers()
            self._server.gather()
            self._add(now - stats.started, stats.samples)
        self._tend()

    def finish(self) -> None:
        """Takes a last snapshot after training, and returns when all are measured."""
        self._add(self._server.stats.seconds, self._server.stats.samples)
        self._finish()

    def abandon(self) -> None:
        """Ends without measuring what waits: the job is preempted."""
        return

    @abstractmethod
    def _add(self, seconds: float, samples: int) -> None:
        """Takes a snapshot."""

    @abstractmethod
    def _tend(self) -> None:
        """Does what is due between snapshots; returns at once."""

    @abstractmethod
    def _finish(self) -> None:
        """Has all snapshots measured."""


class Album(Gallery):
    """Keeps the snapshots, to measure them after training; each takes host memory for a copy of the model."""

    def __init__(self, server: Server | Peer, evaluation: Evaluation, replicas: Sequence[Replica]) -> None:
        super().__init__(server, evaluation, replicas)
        self._kept: list[_Snapshot] = []

    def _add(self, seconds: float, samples: int) -> None:
        snapshot = _Snapshot(self._replicas)
        snapshot.take(seconds, samples)
        self._kept.append(snapshot)

    def _tend(self) -> None:
        pass

    def _finish(self) -> None:
        for snapshot in self._kept:
            snapshot.put_back()
            accuracy, loss = self._evaluation.measure(self._replicas[0].model)
            self._evaluation.curve.append(Point(snapshot.seconds, snapshot.samples, accuracy, loss))


class Exhibition(Gallery):
    """Shows each snapshot to the evaluator rank, whenever it is free; training never waits for it.

    Up to WAITING snapshots wait in order; where there is no more room the newest replaces the last of them.

    Args:
        server, evaluation, replicas: see `Gallery`.
        transport, rank: where the evaluator is.
        timeout: seconds; an evaluator that waits for a snapshot hears from the server twice in this time.
    """

    def __init__(
        self,
        server: Server,
        evaluation: Evaluation,
        replicas: Sequence[Replica],
        transport: Transport,
        rank: int,
        *,
        timeout: float,
    ) -> None:
        super().__init__(server, evaluation, replicas)
        self._timeout, self._rank, self._serving = timeout, rank, server
        self._figures, self._release, values = _places(replicas)
        self._measured, self._seconds = values
        self._end = transport.server_end([self._figures], [self._release.header], [rank])
        self._free = [_Snapshot(replicas) for _ in range(WAITING + 1)]
        self._waiting: deque[_Snapshot] = deque()
        self._shown: _Snapshot | None = None
        self._idle_since: float | None = None  # when a free evaluator last heard from us
        self._farewell: int = Flag.STOP

    def abandon(self) -> None:
        """Lets the evaluator measure what it has, and tells it to end with the job."""
        self._free += self._waiting
        self._waiting.clear()
        self._farewell |= Flag.PREEMPT
        self._finish()

    def _add(self, seconds: float, samples: int) -> None:
        self._collect(0.0)
        if len(self._waiting) == WAITING:
            self._free.append(self._waiting.pop())
            self._evaluation.skipped += 1
        snapshot = self._free.pop()
        snapshot.take(seconds, samples)
        self._waiting.append(snapshot)
        self._send_next()

    def _tend(self) -> None:
        self._collect(0.0)
        self._send_next()
        if self._idle_since is not None and time.monotonic() - self._idle_since > self._timeout / 2:
            self._send(None)

    def _finish(self) -> None:
        until = time.monotonic() + self._timeout
        while self._waiting or self._shown or self._idle_since is None:
            self._send_next()
            if self._collect(0.5):
                until = time.monotonic() + self._timeout
            elif time.monotonic() > until:
                raise StallError(
                    f"the evaluator (rank {self._rank}) has not measured a snapshot within {self._timeout:g} s: "
                    "it is stuck, or raise stall_timeout"
                )
        self._send(None, self._farewell)
        if not self._end.receive(self._timeout):
            raise StallError(f"the evaluator (rank {self._rank}) did not leave within {self._timeout:g} s")
        self._end.close(self._timeout)

    def _collect(self, timeout: float) -> bool:
        """Takes the figures of the snapshot that the evaluator has, if they are here; returns whether they are."""
        if not self._end.receive(timeout):
            return False
        self._idle_since = time.monotonic()
        if Header.unpack(self._figures.header).flags & Flag.PREEMPT:
            self._serving.preempt_asked = True
        if self._shown and Header.unpack(self._figures.header).samples:
            accuracy, loss = self._measured.tolist()
            self._evaluation.curve.append(Point(self._shown.seconds, self._shown.samples, accuracy, loss))
            self._free.append(self._shown)
            self._shown = None
        return True

    def _send_next(self) -> None:
        if self._waiting and self._idle_since is not None:
            self._send(self._waiting.popleft())

    def _send(self, snapshot: _Snapshot | None, flags: int = Flag.NONE) -> None:
        self._shown, self._idle_since = snapshot, None
        header = Header(Kind.RELEASE, sender=0, layout=self._replicas[0].layout, step=0, flags=flags)
        if snapshot:
            header.samples, header.nbytes = snapshot.samples, snapshot.parts.nbytes
            self._seconds[0] = snapshot.seconds
        header.pack_into(self._release.header)
        self._end.release(0, snapshot.parts if snapshot else self._release.parts, empty=snapshot is None)


class Critic:
    """The evaluator's side: asks for snapshots and measures them until the server says that there are no more."""

    def __init__(
        self, replicas: Sequence[Replica], evaluation: Evaluation, transport: Transport, *, timeout: float
    ) -> None:
        self._replica, self._evaluation, self._timeout = replicas[0], evaluation, timeout
        self._figures, self._release, values = _places(replicas)
        self._measured, self._seconds = values
        self._rank = transport.rank
        self._end = transport.worker_end(self._figures, self._release)

    def run(self) -> bool:
        """Measures until training is over, the model being the final one, or preempted; returns whether it was."""
        samples = 0
        while True:
            header = Header(Kind.PUSH, self._rank, self._replica.layout, 0, samples=samples)
            header.flags = Flag.PREEMPT if preempt.requested() else Flag.NONE
            header.pack_into(self._figures.header)
            self._end.push()
            if not self._end.receive(2 * self._timeout):
                raise StallError(
                    f"rank {self._rank} (evaluator): nothing from the server within {2 * self._timeout:g} s"
                )
            header = Header.unpack(self._release.header)
            samples = header.samples
            if header.nbytes:
                point = Point(float(self._seconds[0]), samples, *self._evaluation.measure(self._replica.model))
                self._evaluation.curve.append(point)
                self._measured[:] = point.accuracy, point.loss
            elif header.flags & Flag.STOP:
                break
        Header(Kind.LEAVE, self._rank, self._replica.layout, 0).pack_into(self._figures.header)
        if not self._end.leave(self._timeout):
            raise StallError(f"rank {self._rank} (evaluator): the server did not take the leave")
        self._end.close()
        return bool(header.flags & Flag.PREEMPT)
