"""Takes a step together with all other workers, without a server; knows no MPI."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from stalempi import preempt
from stalempi.errors import ConfigError, NonFiniteError, ProtocolError, StallError
from stalempi.gradients import GradientBook
from stalempi.policy import Allreduce
from stalempi.policy.base import Decision, Event, Leave, Push
from stalempi.replica import Replica
from stalempi.server import ServerOptions
from stalempi.slots import combine_buffers
from stalempi.stats import RunStats, WorkerStats
from stalempi.sums import BucketSums
from stalempi.transport.base import Transport
from stalempi.transport.message import Flag, Header, Kind
from stalempi.transport.staging import Copier

__all__ = ["Peer"]

Observe = Callable[[Event, list[Decision]], None]


class Peer:
    """One worker of a job without a server.

    A round: every rank adds its gradient, times the samples it stands for, to the sum of all (`BucketSums`); then all
    exchange tickets (a push's header: samples, hyper-parameters, touched flags), and each makes the same update, with
    the hyper-parameters of the first. A worker without data goes on taking part, with zeros, until nobody has any.

    Args:
        replica: the model that the user computes gradients with.
        transport: reaches the other ranks.
        policy: says whether buckets may go before `step`.
        options: the options of a server, which all ranks carry out alike.
        overlap: whether buckets may go before `step`; the policy may forbid it.
        seen: returns the samples that went through the model since the last step.
        observe: called with a push for each worker after each round.
        copier: brings gradients to host memory; that of their device by default.

    Attributes:
        stats: what has happened so far, the same on every rank.
        step_count: this worker's clock: steps so far.
        owed: whether others wait for what this worker has not sent; they always do.
        over: whether no worker has data any more.
        preempted: whether a rank was asked to end; all learn of it in the same round.
    """

    owed = True

    def __init__(  # noqa: PLR0913 - what a server and a worker take, together
        self,
        replica: Replica,
        transport: Transport,
        *,
        policy: Allreduce,
        options: ServerOptions,
        seen: Callable[[], int],
        overlap: bool = True,
        observe: Observe | None = None,
        copier: Copier | None = None,
    ) -> None:
        self.replica, self._transport, self._policy, self.options = replica, transport, policy, options
        self._observe = observe
        self.gradients = replica.params.like()
        self._sums = BucketSums(
            replica.trained,
            self.gradients,
            bucket_bytes=replica.bucket_bytes,
            overlap=policy.overlap and overlap,
            seen=seen,
            copier=copier,
        )
        self._ticket = bytearray(replica.header_bytes)
        self._tickets = bytearray(replica.header_bytes * transport.size)
        self._hyper, self._touched = replica.hyper(self._ticket), replica.touched(self._ticket)
        self._end = self._sums.end = transport.peer_end(self._ticket, self._tickets, self._sums.totals)
        self._book = GradientBook(replica.trained, self.gradients, on_ready=self._sums.ready)
        now = options.now()
        self.stats = RunStats([WorkerStats(started=now, ended=now) for _ in range(transport.size)], started=now)
        policy.start(transport.size, now)
        self.step_count = self._round_number = 0
        self.waited = 0.0
        self._factor = options.factor(0)
        self.over = self.preempted = False
        self.zero_grad()

    @property
    def global_samples(self) -> int:
        """Samples of all workers that have been applied."""
        return self.stats.samples

    @property
    def stopping(self) -> bool:
        """Whether enough samples have been applied, the same on every rank."""
        return self.options.is_enough(self.stats.samples)

    @property
    def rate(self) -> float:
        """Learning rate of the latest update, by this rank's own; of the first where none has been made."""
        return float(self.replica.optimizer.param_groups[0]["lr"]) * self._factor

    def zero_grad(self) -> None:
        """Sets all gradients to zero and makes them views of the flat storage again."""
        self._sums.buckets.zeroed()
        self._book.zero()

    def step(self, *, samples: int, loss: float = math.nan) -> None:
        """Adds this gradient, which stands for `samples` samples, to all others', and makes the update they give.

        Raises ConfigError without samples, or if the gradient is not what backward has begun to send; StallError if a
        rank is silent; NonFiniteError on every rank if one's gradient is not finite.
        """
        if samples < 1:
            raise ConfigError(f"a gradient stands for at least 1 sample, got {samples}: leave out steps without data")
        self._book.collect(self._touched)
        self._hyper[:] = self.replica.read_hyper()
        header = self._header(Kind.PUSH, samples=samples, loss=loss)
        header.flags = Flag.NONE if self._sums.is_finite() else Flag.NONFINITE
        header.flags |= _wish()
        header.pack_into(self._ticket)
        self._sums.send_rest(samples)
        self.step_count += 1
        self._end_round()
        self._sums.buckets.begin()

    def leave(self) -> None:
        """Takes part without data until nobody has any; all then have the same model and running statistics.

        Raises ConfigError if backward has begun to send a gradient that no step has taken: it is in the others' sums.
        """
        if self._sums.buckets.handed:
            raise ConfigError(
                "this worker leaves with a gradient that backward has begun to send: step, or use overlap='off'"
            )
        self._sums.buckets.early = False  # the model may go on to be used
        while not self.over:
            header = self._header(Kind.LEAVE)
            header.flags = _wish()
            header.pack_into(self._ticket)
            self._sums.send_zeros()
            self._end_round()
        self._sums.settle()
        self._combine_buffers()
        self._end.close()

    def _header(self, kind: Kind, *, samples: int = 0, loss: float = math.nan) -> Header:
        return Header(
            kind,
            sender=self._transport.rank,
            layout=self.replica.layout,
            step=self._round_number + 1,
            version=self.stats.updates,
            samples=samples,
            loss=loss,
            waited=self.waited,
        )

    def _end_round(self) -> None:
        self._end.exchange()
        began = time.perf_counter()
        if not self._end.receive(self.options.stall_timeout):
            raise StallError(
                f"worker {self._transport.rank} step {self.step_count}: the sum over all ranks was not complete within "
                f"{self.options.stall_timeout:g} s: a rank is stuck, or has ended without optimizer.close()"
            )
        self.waited = time.perf_counter() - began
        self._round_number += 1
        width = len(self._ticket)
        tickets = [self._tickets[rank * width : (rank + 1) * width] for rank in range(self._transport.size)]
        headers = [Header.unpack(ticket) for ticket in tickets]
        for rank, header in enumerate(headers):
            if (header.sender, header.layout, header.step) != (rank, self.replica.layout, self._round_number):
                raise ProtocolError(f"rank {rank} is at step {header.step}, this one at {self._round_number}")
        pushed = [rank for rank, header in enumerate(headers) if header.kind is Kind.PUSH]
        self.over = not pushed
        self.preempted = self.preempted or any(header.flags & Flag.PREEMPT for header in headers)
        now = self.options.now()
        self._count(headers, now)
        poor = [rank for rank in pushed if headers[rank].flags & Flag.NONFINITE]
        if poor:
            self._refuse(poor, pushed, headers)
        elif pushed:
            self._update([headers[rank] for rank in pushed], [tickets[rank] for rank in pushed])
        if self.over:
            self.stats.ended = now
        self._tell(headers, now)

    def _count(self, headers: Sequence[Header], now: float) -> None:
        for header, stats in zip(headers, self.stats.workers, strict=True):
            if not self._policy.clocks.is_active(header.sender):
                continue
            stats.ended = now
            stats.waited += header.waited
            if header.kind is Kind.PUSH:
                stats.iterations += 1
                stats.loss = header.loss
                self.stats.count_loss(header.loss)

    def _refuse(self, poor: Sequence[int], pushed: Sequence[int], headers: Sequence[Header]) -> None:
        """Leaves the round's update out: what is not finite is in the sum already."""
        if self.options.nonfinite == "raise":
            header = headers[poor[0]]
            raise NonFiniteError(
                f"worker {poor[0]} has a gradient with NaN or infinity at step {header.step} (loss {header.loss:g}): "
                "lower the learning rate, clip gradients, or check the data"
            )
        for rank in pushed:
            stats = self.stats.workers[rank]
            stats.nonfinite, stats.dropped = stats.nonfinite + (rank in poor), stats.dropped + (rank not in poor)

    def _update(self, headers: Sequence[Header], tickets: Sequence[bytearray]) -> None:
        """Makes one update with the sample-weighted mean of all gradients (law 4)."""
        samples = sum(header.samples for header in headers)
        self._sums.bring_back(samples)
        touched = np.logical_or.reduce([self.replica.touched(ticket) for ticket in tickets])
        for parameter, view, has_gradient in zip(self.replica.trained, self.gradients.views, touched, strict=True):
            parameter.grad = view if has_gradient else None
        if self.options.clip:
            self.options.clip(self.replica.trained)
        self._factor = self.options.factor(self.stats.samples)
        self.replica.step_with(self.replica.hyper(tickets[0]).tolist(), self._factor)
        for parameter, view in zip(self.replica.trained, self.gradients.views, strict=True):
            parameter.grad = view
        self.stats.updates += 1
        self.stats.samples += samples
        for header in headers:
            stats = self.stats.workers[header.sender]
            stats.samples += header.samples
            stats.count_staleness(0)

    def _tell(self, headers: Sequence[Header], now: float) -> None:
        for worker, header in enumerate(headers):
            event: Event = Push(worker, now) if header.kind is Kind.PUSH else Leave(worker, now)
            if self._policy.clocks.is_active(worker):
                decisions = self._policy.on_push(event) if isinstance(event, Push) else self._policy.on_leave(event)
                if self._observe:
                    self._observe(event, decisions)

    def gather(self) -> None:
        """Does nothing: every rank has the whole model."""

    def combine_buffers(self) -> None:
        """Does nothing: until the end each worker's running statistics are its own."""

    def _combine_buffers(self) -> None:
        ours = self.replica.buffers
        if not ours.storages:
            return
        given = b"".join(storage.view(torch.uint8).cpu().numpy().tobytes() for storage in ours.storages)
        everybody = {}
        for worker, data in enumerate(self._transport.allgather(given, self.options.stall_timeout)):
            everybody[worker] = ours.like()
            raw, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0
            for storage in everybody[worker].storages:
                storage.view(torch.uint8).copy_(raw[start : start + storage.nbytes])
                start += storage.nbytes
        combine_buffers(ours, everybody, {w: stats.samples for w, stats in enumerate(self.stats.workers)})


def _wish() -> Flag:
    """Returns what tells the others that this rank was asked to end, if it was."""
    return Flag.PREEMPT if preempt.requested() else Flag.NONE
