"""Applies gradients and carries out the policy's decisions; knows no MPI."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stalempi.errors import ConfigError, NonFiniteError, ProtocolError, StallError
from stalempi.flat import Flat
from stalempi.policy.base import Apply, Continue, Decision, Drop, Event, Leave, Policy, Push, Release
from stalempi.replica import Replica
from stalempi.stats import RunStats, WorkerStats
from stalempi.transport.base import Packet, Parts, ServerEnd, Transport
from stalempi.transport.message import HEADER_BYTES, Flag, Header, Kind

__all__ = ["Server", "ServerOptions"]

logger = logging.getLogger("stalempi.server")

# How long a release may still read the parameters before an update gets a copy to work on instead of waiting (s).
_PATIENCE = 0.02


@dataclass(frozen=True)
class ServerOptions:
    """How a server runs.

    Attributes:
        total_samples: global samples after which workers are told to stop; None: until they have no more data.
        schedule: factor of the workers' learning rates as a function of global samples (law 11).
        nonfinite: "raise" ends the run at a gradient with a NaN or infinity, "skip" counts it and goes on without it.
        stall_warning, stall_timeout: seconds of silence of a computing worker before a warning and before StallError.
        now: the server's clock, seconds.
    """

    total_samples: int | None = None
    schedule: Callable[[int], float] | None = None
    nonfinite: str = "raise"
    stall_warning: float = 60.0
    stall_timeout: float = 600.0
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.total_samples is not None and self.total_samples < 1:
            raise ConfigError(f"total_samples must be at least 1, got {self.total_samples}")
        if self.nonfinite not in ("raise", "skip"):
            raise ConfigError(f"nonfinite must be 'raise' or 'skip', got {self.nonfinite!r}")
        if self.stall_timeout <= 0 or self.stall_warning <= 0:
            raise ConfigError(f"stall times must be above 0 s, got {self.stall_warning:g} and {self.stall_timeout:g}")


class _Slot:
    """Where one worker's pushes arrive, and what the server knows of the worker."""

    def __init__(self, replica: Replica) -> None:
        self.gradients: Flat = replica.params.like()
        self.buffers: Flat = replica.buffers.like()
        self.packet: Packet = replica.push_packet(self.gradients, self.buffers)
        self.hyper = replica.hyper(self.packet)
        self.touched = replica.touched(self.packet)
        self.release_header = bytearray(HEADER_BYTES)
        self.push: Header | None = None  # the push that waits to be applied
        self.version = 0  # updates in the parameters that the worker has
        self.heard = 0.0
        self.warned = False


class Server:
    """Rank 0 of a data-parallel job.

    Args:
        replica: the model and optimizer that gradients are applied to, in place.
        policy: decides; started by `serve`.
        transport: reaches the workers; its ranks 1 .. size - 1.
        options: see `ServerOptions`.
        observe: is called with every event and the decisions that followed, after they were carried out.

    Attributes:
        stats: what has happened so far.
    """

    def __init__(
        self,
        replica: Replica,
        policy: Policy,
        transport: Transport,
        *,
        options: ServerOptions | None = None,
        observe: Callable[[Event, list[Decision]], None] | None = None,
    ) -> None:
        self.replica, self.policy, self.options = replica, policy, options or ServerOptions()
        self._observe = observe
        self._slots = [_Slot(replica) for _ in range(transport.size - 1)]
        self._parts = replica.release_parts()
        self._spare: list[tuple[list[torch.Tensor], Parts]] = []
        self._end: ServerEnd = transport.server_end(
            [slot.packet for slot in self._slots], [slot.release_header for slot in self._slots]
        )
        self._hyper = np.array(replica.read_hyper())
        self.stats = RunStats([WorkerStats() for _ in self._slots])

    @property
    def stopping(self) -> bool:
        """Whether enough global samples have been applied, so that workers are told to leave."""
        total = self.options.total_samples
        return total is not None and self.stats.samples >= total

    def serve(self) -> RunStats:
        """Serves until every worker has left; the model then holds the final parameters and running statistics."""
        now = self.options.now()
        self.stats.started = now
        for slot, stats in zip(self._slots, self.stats.workers, strict=True):
            slot.heard = stats.started = now
        self.policy.start(len(self._slots), now)  # everybody has the first parameters since joining
        while self.policy.clocks.num_active:
            arrived = self._end.receive(timeout=0.5)
            for worker in arrived:
                self._handle(worker, self.options.now())
            if not arrived:
                self._check_silence(self.options.now())
        self.stats.ended = self.options.now()
        self._end.close(self.options.stall_timeout)
        self.combine_buffers()
        return self.stats

    def _handle(self, worker: int, now: float) -> None:
        slot, stats = self._slots[worker], self.stats.workers[worker]
        header = Header.unpack(slot.packet.header)
        slot.heard, slot.warned, stats.ended = now, False, now
        if not math.isnan(header.waited):
            stats.waited += header.waited
        event: Event
        if header.kind is Kind.LEAVE:
            event = Leave(worker, now)
            decisions = self.policy.on_leave(event)
        else:
            self._admit(worker, header)
            event = Push(worker, now)
            decisions = self.policy.on_push(event)
            stats.count_gap(self.policy.clocks.gap(worker))
        self._carry_out(decisions)
        if self._observe:
            self._observe(event, decisions)

    def _admit(self, worker: int, header: Header) -> None:
        slot, stats = self._slots[worker], self.stats.workers[worker]
        if header.layout != self.replica.layout:
            raise ProtocolError(f"worker {worker} step {header.step}: its layout is not the one agreed on")
        if header.step != stats.iterations + 1:
            raise ProtocolError(f"worker {worker} sent step {header.step} after step {stats.iterations}")
        stats.iterations += 1
        stats.loss = header.loss
        self.stats.count_loss(header.loss)
        if header.flags & Flag.NONFINITE:
            self._refuse(worker, header)
        slot.push = header

    def _refuse(self, worker: int, header: Header) -> None:
        if self.options.nonfinite == "raise":
            raise NonFiniteError(
                f"worker {worker} pushed a gradient with NaN or infinity at step {header.step} (loss {header.loss:g}): "
                "lower the learning rate, clip gradients, or check the data"
            )
        self.stats.workers[worker].nonfinite += 1
        header.nbytes = header.samples = 0

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Apply(workers):
                    self._apply(workers)
                case Release(worker):
                    self._release(worker)
                case Continue(worker):
                    self._release(worker, empty=True)
                case Drop(worker):
                    self._slots[worker].push = None
                    self.stats.workers[worker].dropped += 1

    def _apply(self, workers: Sequence[int]) -> None:
        """Makes one update with the sample-weighted mean of the waiting gradients (law 4)."""
        pushes = {worker: self._take(worker) for worker in workers}
        full = [worker for worker, push in pushes.items() if push.nbytes]
        if not full:
            return
        samples = sum(pushes[worker].samples for worker in full)
        gradients, touched = self._mean(full, {w: pushes[w].samples / max(1, samples) for w in full})
        self._make_room()
        for parameter, view, has_gradient in zip(self.replica.trained, gradients.views, touched, strict=True):
            parameter.grad = view if has_gradient else None
        self._set_hyper(self._slots[full[0]].hyper)
        self.replica.optimizer.step()
        for worker in full:
            self.stats.workers[worker].count_staleness(self.stats.updates - pushes[worker].version)
            self.stats.workers[worker].samples += pushes[worker].samples
        self.stats.updates += 1
        self.stats.samples += samples

    def _take(self, worker: int) -> Header:
        push = self._slots[worker].push
        assert push is not None, f"worker {worker} has no gradient waiting"
        self._slots[worker].push = None
        return push

    def _mean(
        self, workers: Sequence[int], weights: dict[int, float]
    ) -> tuple[Flat, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """Sums up in the first worker's receive buffer, which is ours until its release."""
        first, *others = workers
        total, touched = self._slots[first].gradients, self._slots[first].touched
        if others:
            for storage in total.storages:
                storage.mul_(weights[first])
            touched = touched.copy()
        for worker in others:
            slot = self._slots[worker]
            touched |= slot.touched
            for storage, addend in zip(total.storages, slot.gradients.storages, strict=True):
                storage.add_(addend, alpha=weights[worker])
        return total, touched

    def _make_room(self) -> None:
        """Makes sure that no release on its way reads the parameters that are about to change.

        A release normally goes out in no time. If one lingers (a paused or distant worker), it keeps the storage that
        it reads, and the parameters move to another, so that nobody waits for that worker.
        """
        if self._end.settle(self._parts, _PATIENCE):
            return
        for place, (_, parts) in enumerate(self._spare):
            if self._end.settle(parts, 0.0):
                storages, parts = self._spare.pop(place)
                break
        else:
            storages, parts = [torch.empty_like(s) for s in self.replica.params.storages], None
        old = self.replica.params.move(self.replica.trained, storages)
        self._spare.append((old, self._parts))
        self._parts = parts or self.replica.release_parts()

    def _set_hyper(self, values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        schedule = self.options.schedule
        if schedule is None and np.array_equal(values, self._hyper):
            return
        self._hyper = values.copy()
        self.replica.write_hyper(values.tolist())
        if schedule is not None:
            factor = schedule(self.stats.samples)
            for group in self.replica.optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _release(self, worker: int, *, empty: bool = False) -> None:
        slot = self._slots[worker]
        if not empty:
            slot.version = self.stats.updates
        header = Header(
            Kind.RELEASE,
            sender=0,
            layout=self.replica.layout,
            step=self.policy.clocks.counts[worker],
            version=slot.version,
            samples=self.stats.samples,
            nbytes=0 if empty else self._parts.nbytes,
            flags=Flag.STOP if self.stopping else Flag.NONE,
        )
        header.pack_into(slot.release_header)
        self._end.release(worker, self._parts, empty=empty)
        slot.heard = self.options.now()

    def _check_silence(self, now: float) -> None:
        for worker, slot in enumerate(self._slots):
            silent = now - slot.heard
            if not self.policy.is_running(worker) or silent < self.options.stall_warning:
                continue
            where = f"worker {worker} (rank {worker + 1}) has been silent for {silent:.0f} s since step {self.stats.workers[worker].iterations}"
            if silent >= self.options.stall_timeout:
                raise StallError(f"{where}: it is stuck or gone; raise stall_timeout if its steps take that long")
            if not slot.warned:
                slot.warned = True
                waiting = [str(w) for w in self.policy.clocks.workers() if not self.policy.is_running(w)]
                logger.warning("%s; waiting for it: workers %s", where, ", ".join(waiting) or "none")

    def combine_buffers(self) -> None:
        """Sets the model's buffers to the mean over workers, weighted by samples; integer ones to the largest.

        Running statistics are running means, so the mean over workers of each one's is what one process would have
        kept of all their batches (the spread between the workers' means aside).
        """
        counted = [
            (slot, stats.samples) for slot, stats in zip(self._slots, self.stats.workers, strict=True) if stats.samples
        ]
        total = sum(samples for _, samples in counted)
        if not counted:
            return
        for number, storage in enumerate(self.replica.buffers.storages):
            theirs = [slot.buffers.storages[number] for slot, _ in counted]
            if storage.is_floating_point() or storage.is_complex():
                mean = sum(
                    values.double() * (samples / total) for values, (_, samples) in zip(theirs, counted, strict=True)
                )
                assert isinstance(mean, torch.Tensor)
                storage.copy_(mean)
            else:
                storage.copy_(torch.stack(theirs).amax(0))
