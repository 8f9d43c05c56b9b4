"""Applies gradients and carries out the policy's decisions; knows no MPI."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stalempi.clip import Clip
from stalempi.correction import Correction
from stalempi.errors import ConfigError, NonFiniteError, ProtocolError
from stalempi.master import MasterCopy
from stalempi.policy import CachedSSP
from stalempi.policy.base import Apply, Continue, Decision, Drop, Event, Leave, Policy, Push, Release
from stalempi.replica import Replica
from stalempi.silence import CHECK_EVERY, Silence
from stalempi.slots import Slot, combine_buffers, weighted_mean
from stalempi.stats import RunStats, WorkerStats
from stalempi.stepper import Stepper
from stalempi.transport.base import ServerEnd, Transport
from stalempi.transport.message import Flag, Header, Kind

__all__ = ["Attendant", "Server", "ServerOptions"]


class Attendant(Protocol):
    """Whoever looks after a server while it serves: checkpoints and preemption (see `train/keeper.py`)."""

    def started(self, now: float) -> None:
        """Is called once the policy has been started, at `now` (s)."""

    def between(self, now: float) -> None:
        """Is called at `now` (s) after every event, and at least every CHECK_EVERY seconds."""

    def ended(self) -> None:
        """Is called when every worker has left, unless the server was drained."""


@dataclass(frozen=True)
class ServerOptions:
    """How a server runs.

    Attributes:
        total_samples: global samples after which workers are told to stop; None: until they have no more data.
        schedule: factor of the workers' learning rates as a function of global samples (law 11).
        nonfinite: "raise" ends the run at a gradient with a NaN or infinity, "skip" counts it and goes on without it.
        stall_warning, stall_timeout: seconds of silence of a computing worker before a warning and before StallError.
        now: the server's clock, seconds.
        workers: the rank of each worker (a group's leader); by default every rank but 0.
        clip: limits of each gradient that is applied: under BSP the mean of a round, else one worker's.
        note_bytes: bytes of the note in each push, see `Replica.push_packet`.
    """

    total_samples: int | None = None
    schedule: Callable[[int], float] | None = None
    nonfinite: str = "raise"
    stall_warning: float = 60.0
    stall_timeout: float = 600.0
    now: Callable[[], float] = time.monotonic
    workers: Sequence[int] | None = None
    clip: Clip | None = None
    note_bytes: int = 0

    def __post_init__(self) -> None:
        if self.total_samples is not None and self.total_samples < 1:
            raise ConfigError(f"total_samples must be at least 1, got {self.total_samples}")
        if self.nonfinite not in ("raise", "skip"):
            raise ConfigError(f"nonfinite must be 'raise' or 'skip', got {self.nonfinite!r}")
        if self.stall_timeout <= 0 or self.stall_warning <= 0:
            raise ConfigError(f"stall times must be above 0 s, got {self.stall_warning:g} and {self.stall_timeout:g}")

    def factor(self, samples: int) -> float:
        """Returns the factor of the learning rate after `samples` global samples."""
        return self.schedule(samples) if self.schedule else 1.0


class Server:
    """Rank 0 of a data-parallel job.

    Args:
        replica: the model and optimizer that gradients are applied to, in place.
        policy: decides; started by `serve`.
        transport: reaches the workers.
        options: see `ServerOptions`.
        correction: mends stale gradients; not for a policy that lets workers go on with their own copy.
        observe: is called with every event and the decisions that followed, after they were carried out.

    Attributes:
        stats: what has happened so far.
        attendant: looks after it; None: nobody does.
        preempt_asked: whether a worker has said that it was asked to end.
    """

    def __init__(
        self,
        replica: Replica,
        policy: Policy,
        transport: Transport,
        *,
        options: ServerOptions | None = None,
        correction: Correction | None = None,
        observe: Callable[[Event, list[Decision]], None] | None = None,
    ) -> None:
        self.replica, self.policy, self.options = replica, policy, options or ServerOptions()
        self._observe = observe
        self._ranks = self.options.workers or range(1, transport.size)
        self._slots = [Slot(replica, note_bytes=self.options.note_bytes) for _ in self._ranks]
        self._end: ServerEnd = transport.server_end(
            [slot.packet for slot in self._slots], [slot.release_header for slot in self._slots], self._ranks
        )
        self._master = MasterCopy(replica, self._end.settle)
        self._stepper = Stepper(replica)
        self._hyper, self._factor = np.array(replica.read_hyper()).tobytes(), math.nan
        self._correction = correction
        if correction and isinstance(policy, CachedSSP):
            raise ConfigError(f"correction {correction.name} needs releases, but {policy} lets workers do without")
        if correction:
            correction.start(replica, len(self._slots))
        self.stats = RunStats([WorkerStats() for _ in self._slots])
        self.attendant: Attendant | None = None
        self.preempt_asked = self._draining = False
        self._absent: set[int] = set()  # waited when the checkpoint was taken, and have not said that they are here
        self._postponed: dict[int, bool] = {}  # their releases, by whether they are empty

    @property
    def stopping(self) -> bool:
        """Whether enough global samples have been applied, so that workers are told to leave."""
        total = self.options.total_samples
        return total is not None and self.stats.samples >= total

    @property
    def rate(self) -> float:
        """Learning rate of the latest update; of the next one where none has been made since the start."""
        rate = float(self.replica.optimizer.param_groups[0]["lr"])
        return rate * self.options.factor(self.stats.samples) if math.isnan(self._factor) else rate

    @property
    def slots(self) -> Sequence[Slot]:
        """What it keeps of each worker."""
        return self._slots

    @property
    def correction(self) -> Correction | None:
        """What mends stale gradients."""
        return self._correction

    @property
    def at_rest(self) -> bool:
        """Whether no gradient waits to be applied, so that the parameters tell of every push received."""
        return all(slot.push is None for slot in self._slots)

    def drain(self) -> None:
        """Tells every worker to leave, now or at its next push, which is then not applied: the job is preempted."""
        self._draining = True
        for worker in self.policy.clocks.workers():
            if not self.policy.is_running(worker):
                self._release(worker, empty=True)

    def serve(self) -> RunStats:
        """Serves until every worker has left; the model then holds the final parameters and running statistics."""
        now = self.options.now()
        self.stats.started = now
        for stats in self.stats.workers:
            stats.started = now
        limits = {"warning": self.options.stall_warning, "timeout": self.options.stall_timeout}
        self._silence = Silence(self._ranks, now, **limits)
        self.policy.start(len(self._slots), now)  # everybody has the first parameters since joining
        if self.attendant:
            self.attendant.started(now)
        self._absent = {worker for worker in self.policy.clocks.workers() if not self.policy.is_running(worker)}
        while self.policy.clocks.num_active:
            for worker in self._end.receive(timeout=CHECK_EVERY):
                self._handle(worker, self.options.now())
                self._attend()
            self._attend()
            self._silence.check(self.policy, self.options.now())
        self.stats.ended = self.options.now()
        if self.attendant and not self._draining:
            self.attendant.ended()
        self._end.close(self.options.stall_timeout)
        self.combine_buffers()
        return self.stats

    def combine_buffers(self) -> None:
        """Makes the model's buffers (running statistics) what all workers' together say, so that it evaluates right."""
        samples = {worker: stats.samples for worker, stats in enumerate(self.stats.workers)}
        combine_buffers(self.replica.buffers, {w: slot.buffers for w, slot in enumerate(self._slots)}, samples)

    def _attend(self) -> None:
        if self.attendant and not self._draining:
            self.attendant.between(self.options.now())

    def _handle(self, worker: int, now: float) -> None:
        slot, stats = self._slots[worker], self.stats.workers[worker]
        header = Header.unpack(slot.packet.header)
        self._silence.broken(worker, now)
        slot.step = header.step
        if header.flags & Flag.WAITING:
            self._arrived(worker)
            return
        if self._draining:
            self._turn_away(worker, header, now)
            return
        slot.accept(header)
        self.preempt_asked = self.preempt_asked or bool(header.flags & Flag.PREEMPT)
        stats.ended = now
        if not math.isnan(header.waited):
            stats.waited += header.waited
            stats.hidden += header.hidden
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

    def _arrived(self, worker: int) -> None:
        """Takes note that a worker is here for the release that was due to it before the checkpoint."""
        self._absent.discard(worker)
        if worker in self._postponed:
            self._release(worker, empty=self._postponed.pop(worker))

    def _turn_away(self, worker: int, header: Header, now: float) -> None:
        """Answers a push that came after the last checkpoint; it is in none, so whoever resumes makes it again."""
        if header.kind is Kind.LEAVE:
            self.policy.on_leave(Leave(worker, now))
        else:
            self._release(worker, empty=True)

    def _admit(self, worker: int, header: Header) -> None:
        slot, stats = self._slots[worker], self.stats.workers[worker]
        if header.layout != self.replica.layout:
            raise ProtocolError(f"worker {worker} step {header.step}: its layout is not the one agreed on")
        if header.step != stats.iterations + 1:
            raise ProtocolError(f"worker {worker} sent step {header.step} after step {stats.iterations}")
        if header.nbytes and not header.samples:
            raise ProtocolError(f"worker {worker} step {header.step}: its gradient stands for no samples")
        stats.iterations += 1
        stats.loss = header.loss
        stats.bytes_pushed += header.nbytes
        self.stats.count_loss(header.loss)
        if header.flags & Flag.NONFINITE:
            self._refuse(worker, header)
        elif not header.nbytes:
            stats.skipped += 1
        slot.push = header

    def _refuse(self, worker: int, header: Header) -> None:
        if self.options.nonfinite == "raise":
            raise NonFiniteError(
                f"worker {worker} pushed a gradient with NaN or infinity at step {header.step} (loss {header.loss:g}): "
                f"lower the learning rate, clip gradients, or check the data{_also(self.replica)}"
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
                    self.stats.workers[worker].dropped += self._slots[worker].take().nbytes > 0

    def _apply(self, workers: Sequence[int]) -> None:
        """Makes one update with the sample-weighted mean of the waiting gradients (law 4)."""
        pushes = {worker: self._slots[worker].take() for worker in workers}
        full = [worker for worker, push in pushes.items() if push.nbytes]
        if not full:
            return
        rate = 1.0
        for worker in full:
            staleness = self.stats.updates - pushes[worker].version
            self.stats.workers[worker].count_staleness(staleness)
            self.stats.workers[worker].samples += pushes[worker].samples
            if self._correction:
                rate = min(rate, self._correction.correct(worker, self._slots[worker].gradients, staleness))
        samples = sum(pushes[worker].samples for worker in full)
        weights = [pushes[worker].samples / samples for worker in full]
        gradients, touched = weighted_mean([self._slots[worker] for worker in full], weights)
        self._master.make_room()
        if self.options.clip:
            self._stepper.show(gradients, touched)
            self.options.clip(self.replica.trained)
        self._set_hyper(self._slots[full[0]].hyper, rate)
        self._stepper.step(gradients, touched)
        self.stats.updates += 1
        self.stats.samples += samples
        if self._correction:
            self._correction.updated()

    def _set_hyper(self, values: NDArray[np.float64], rate: float) -> None:
        """Takes over the worker's hyper-parameters, the rate multiplied by the schedule and by `rate`."""
        factor = rate * self.options.factor(self.stats.samples)
        packed = values.tobytes()
        if factor == self._factor and packed == self._hyper:
            return
        self._hyper, self._factor = packed, factor
        self.replica.write_hyper(values.tolist())
        if factor != 1.0:
            for group in self.replica.optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _release(self, worker: int, *, empty: bool = False) -> None:
        slot = self._slots[worker]
        if worker in self._absent:
            self._postponed[worker] = empty
            return
        if not empty:
            slot.version = self.stats.updates
            if self._correction:
                self._correction.released(worker)
        header = Header(
            Kind.RELEASE,
            sender=0,
            layout=self.replica.layout,
            step=slot.step,
            version=slot.version,
            samples=self.stats.samples,
            nbytes=0 if empty else self._master.parts.nbytes,
            flags=Flag.STOP if self.stopping else Flag.NONE,
        )
        if self._draining:
            header.flags |= Flag.PREEMPT
        header.pack_into(slot.release_header)
        self._end.release(worker, self._master.parts, empty=empty)
        self._silence.broken(worker, self.options.now())


def _also(replica: Replica) -> str:
    """Returns what else may be the cure for a gradient that is not finite."""
    return "; fp16 overflows at 65504 on its way, bf16 does not" if str(replica.compression) == "fp16" else ""
