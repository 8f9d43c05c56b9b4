"""Joins a real server and real workers in one thread: messages take virtual time, gradients are computed when due."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import Tensor

from stalempi.errors import ConfigError
from stalempi.replica import Replica
from stalempi.simulate.agenda import Agenda, Kind
from stalempi.simulate.network import Network, Wire
from stalempi.simulate.workload import Workload
from stalempi.transport.base import Numbers, Packet, Parts, ServerEnd, Transport, WorkerEnd, check_received
from stalempi.transport.message import Header
from stalempi.transport.message import Kind as Message
from stalempi.worker import Worker

__all__ = ["VirtualJob", "VirtualTransport", "VirtualWorker"]


class VirtualWorker(Worker):
    """A worker whose `step` ends with the push on its way; the job hands it the release when that is there."""

    def _await_release(self) -> None:
        """Waits for nothing: one thread plays all ranks."""

    def take_release(self, waited: float) -> None:
        """Takes the release in place, for which it waited `waited` virtual seconds."""
        super()._await_release()
        self.waited = waited


class VirtualJob:
    """The clock and the wire of a job in virtual time, and what its ranks share.

    Args:
        workload: how long workers compute, and who dies.
        network: what messages cost.
        seconds: when workers that are still in are told to have left; infinite for never.

    Attributes:
        now: virtual time (s) of the message that the server works on.
        steps: for each worker, what computes its gradient and pushes it; set by the caller before the server serves.
        workers: for each worker, the product's own.
    """

    def __init__(self, workload: Workload, network: Network, *, seconds: float = math.inf) -> None:
        self.now = 0.0
        self.size = workload.num_workers + 1
        self.seconds = seconds
        self.steps: list[Callable[[], None]] = []
        self.workers: list[VirtualWorker] = []
        self.pushes: list[Packet] = []
        self.ends: list[_WorkerEnd] = []
        self._sent = [0.0] * workload.num_workers
        self._left = [False] * workload.num_workers
        self._wire = Wire(network, workload.num_workers)
        self._agenda = Agenda(workload, self._wire)

    def add(
        self,
        replica: Replica,
        step: Callable[[VirtualWorker], None],
        *,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        """Adds the next worker; `step` computes one gradient in its replica and calls the worker's own `step`.

        `schedule` is the server's, for the steps that a worker takes alone (cached pulls).
        """
        transport = VirtualTransport(self, len(self.workers) + 1)
        worker = VirtualWorker([replica], transport, stall_timeout=math.inf, schedule=schedule)
        self.workers.append(worker)
        self.steps.append(lambda: step(worker))

    def start(self) -> None:
        """Lets all workers begin their first iteration at time 0."""
        for worker in range(len(self.workers)):
            self._agenda.start_iteration(worker, 0.0)

    def receive(self) -> list[int]:
        """Goes on to the next message that the server takes up and returns its worker; all workers at the horizon."""
        while entry := self._agenda.next(self.seconds):
            reached, worker, kind, sent = entry
            if self._left[worker]:
                continue
            now = self._wire.push(reached) if kind is Kind.PUSH else self._wire.leave(reached)
            if now > self.seconds:
                break
            self.now = now
            self._send(worker, sent, kind)
            return [worker]
        assert not math.isinf(self.seconds), "no worker can go on"
        self.now = self.seconds
        still_in = [worker for worker, left in enumerate(self._left) if not left]
        for worker in still_in:
            self._send(worker, self.now, Kind.LOST)
        return still_in

    def release(self, worker: int, header: bytearray, parts: Parts | None) -> None:
        """Brings a release to `worker`, which goes on when it has it; None for one without parameters."""
        received = self._wire.release(worker, empty=parts is None)
        self.ends[worker].deliver(header, parts)
        self.workers[worker].take_release(received - self._sent[worker])
        if self.workers[worker].stopping:
            self._agenda.send(worker, received, Kind.LEAVE)
        else:
            self._agenda.start_iteration(worker, received)

    def _send(self, worker: int, sent: float, kind: Kind) -> None:
        """Makes `worker` send what is due; for one that is lost, the leave is the transport's own."""
        self._sent[worker] = sent
        self._left[worker] = kind is not Kind.PUSH
        if kind is Kind.PUSH:
            self.steps[worker]()
        elif kind is Kind.LEAVE:
            self.workers[worker].leave()
        else:
            theirs = self.workers[worker]
            header = Header(Message.LEAVE, worker + 1, theirs.shares[0].replica.layout, theirs.step_count)
            header.pack_into(self.pushes[worker].header)


class VirtualTransport(Transport):
    """One rank of a job in virtual time."""

    description = "virtual time"

    def __init__(self, job: VirtualJob, rank: int) -> None:
        self._job = job
        self.rank, self.size = rank, job.size

    def allgather(self, data: bytes, timeout: float) -> NoReturn:
        raise ConfigError("ranks in virtual time share one thread and cannot meet: copy the server's model instead")

    def broadcast(self, parts: Parts, timeout: float, root: int = 0) -> NoReturn:
        raise ConfigError("ranks in virtual time share one thread and cannot meet: copy the server's model instead")

    def allreduce(self, values: Numbers, op: str, timeout: float) -> NoReturn:
        raise ConfigError("ranks in virtual time share one thread and cannot meet: add up what they have instead")

    def server_end(
        self, pushes: Sequence[Packet], releases: Sequence[bytearray], workers: Sequence[int] | None = None
    ) -> ServerEnd:
        self._job.pushes = list(pushes)
        return _ServerEnd(self._job, releases)

    def worker_end(self, push: Packet, release: Packet, server: int = 0, *, thread: bool = False) -> WorkerEnd:
        del thread
        end = _WorkerEnd(self._job, self.rank, push, release)
        self._job.ends.append(end)
        return end

    def peer_end(self, ticket: bytearray, tickets: bytearray, sums: Sequence[Tensor]) -> NoReturn:
        raise ConfigError("ranks in virtual time share one thread and cannot meet: take BSP, which decides the same")

    def close(self) -> None:
        pass


class _ServerEnd(ServerEnd):
    def __init__(self, job: VirtualJob, releases: Sequence[bytearray]) -> None:
        self._job, self._releases = job, releases

    def receive(self, timeout: float) -> list[int]:
        return self._job.receive()

    def release(self, worker: int, parts: Parts, *, empty: bool = False) -> None:
        self._job.release(worker, self._releases[worker], None if empty else parts)

    def announce(self, worker: int) -> None:
        pass

    def send(self, worker: int, parts: Parts, place: int) -> None:
        if place == len(parts.wire) - 1:
            self.release(worker, parts)

    def settle(self, parts: Parts, timeout: float) -> bool:
        return True  # a release is read when it is sent; only its arrival is later

    def close(self, timeout: float) -> None:
        pass


class _WorkerEnd(WorkerEnd):
    def __init__(self, job: VirtualJob, rank: int, push: Packet, release: Packet) -> None:
        self._job, self._rank, self._push, self._release = job, rank, push, release
        self._arrived = 0

    def part(self, place: int) -> None:
        pass  # nothing is on its way before the push

    def progress(self) -> None:
        pass

    def push(self, *, empty: bool = False) -> None:
        self._send(None if empty else self._push.parts)

    def leave(self, timeout: float) -> bool:
        self._send(None)
        return True

    def _send(self, parts: Parts | None) -> None:
        target = self._job.pushes[self._rank - 1]
        target.header[:] = self._push.header
        arrived = _copy(parts, target.parts)
        check_received(target, sender=self._rank, kinds=(Message.PUSH, Message.LEAVE), arrived=arrived)

    def deliver(self, header: bytearray, parts: Parts | None) -> None:
        """Puts a release in place, as the network would."""
        self._release.header[:] = header
        self._arrived = _copy(parts, self._release.parts)

    def receive(self, timeout: float) -> bool:
        check_received(self._release, sender=0, kinds=(Message.RELEASE,), arrived=self._arrived)
        return True

    def close(self) -> None:
        pass


def _copy(source: Parts | None, target: Parts) -> int:
    """Copies `source`, if any, and returns the bytes."""
    if source is None:
        return 0
    source.stage_out()
    for place, ours in enumerate(target.wire):
        sent = source.sent(place)
        ours[: len(sent)].copy_(sent)
    target.stage_in()
    return source.filled
