"""Holds parameters and does what was decided about them: takes pushes, applies them, sends releases; knows no MPI."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stalempi import preempt
from stalempi.clip import Clip
from stalempi.correction import Correction
from stalempi.errors import ConfigError, NonFiniteError, ProtocolError
from stalempi.flat import Bucket
from stalempi.master import MasterCopy
from stalempi.replica import Replica
from stalempi.slots import Mean, Slot
from stalempi.stats import RunStats, WorkerStats
from stalempi.stepper import Stepper
from stalempi.transport.base import ServerEnd, Transport
from stalempi.transport.message import Flag, Header, Kind

__all__ = ["Holder", "ServerOptions"]


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

    def is_enough(self, samples: int) -> bool:
        """Returns whether `samples` global samples are all that were asked for, so that workers are told to leave."""
        return self.total_samples is not None and samples >= self.total_samples

    def factor(self, samples: int) -> float:
        """Returns the factor of the learning rate after `samples` global samples."""
        return self.schedule(samples) if self.schedule else 1.0


class Holder:
    """A server's parameters, and what it does with them; who decides is somebody else's matter.

    Args:
        replica: the model and optimizer that gradients are applied to, in place.
        transport: reaches the workers.
        options: see `ServerOptions`.
        correction: mends stale gradients.

    Attributes:
        stats: what has happened so far.
        draining: whether the job is asked to end, so that workers are told to leave and nothing more is applied.
    """

    def __init__(
        self,
        replica: Replica,
        transport: Transport,
        *,
        options: ServerOptions | None = None,
        correction: Correction | None = None,
    ) -> None:
        self.replica, self.options, self._rank = replica, options or ServerOptions(), transport.rank
        self._ranks = self.options.workers or range(1, transport.size)
        self._slots = [Slot(replica, note_bytes=self.options.note_bytes) for _ in self._ranks]
        self._end: ServerEnd = transport.server_end(
            [slot.packet for slot in self._slots], [slot.release_header for slot in self._slots], self._ranks
        )
        self._master = MasterCopy(replica, self._end.settle)
        self._stepper = Stepper(replica)
        self._hyper, self._factor = np.array(replica.read_hyper()).tobytes(), math.nan
        self._correction = correction
        if correction:
            correction.start(replica, len(self._slots))
        self.stats = RunStats([WorkerStats() for _ in self._slots])
        self.draining = False

    @property
    def stopping(self) -> bool:
        """Whether enough global samples have been applied, so that workers are told to leave."""
        return self.options.is_enough(self.stats.samples)

    @property
    def rate(self) -> float:
        """Learning rate of the latest update; of the next one where none has been made since the start."""
        rate = float(self.replica.optimizer.param_groups[0]["lr"])
        return rate * self.options.factor(self.stats.samples) if math.isnan(self._factor) else rate

    @property
    def lingering(self) -> list[Tensor]:
        """Parameters of before, kept while a release still reads them or until they are used again."""
        return self._master.lingering

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

    def take(self, worker: int, header: Header) -> None:
        """Takes the message of `worker` that has arrived with `header`. A push then waits to be applied.

        Raises ProtocolError if it does not follow the last one, NonFiniteError if it is to be refused.
        """
        self._slots[worker].accept(header)
        if header.kind is Kind.PUSH:
            self._admit(worker, header)

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

    def apply(self, workers: Sequence[int], released: Sequence[int] = ()) -> None:
        """Makes one update with the sample-weighted mean of the waiting gradients (law 4).

        Workers in `released` are sent the parameters that it makes, each part as soon as it is made.
        """
        pushes = {worker: self._slots[worker].take() for worker in workers}
        full = [worker for worker, push in pushes.items() if push.nbytes]
        if not full:
            for worker in released:
                self.release(worker)
            return
        rate = 1.0
        for worker in full:
            staleness = self.stats.updates - pushes[worker].version
            self.stats.workers[worker].count_staleness(staleness)
            self.stats.workers[worker].samples += pushes[worker].samples
            if self._correction:
                rate = min(rate, self._correction.correct(worker, self._slots[worker].gradients, staleness))
        samples = sum(pushes[worker].samples for worker in full)
        mean = Mean([self._slots[worker] for worker in full], [pushes[worker].samples / samples for worker in full])
        self._master.make_room()
        self._set_hyper(self._slots[full[0]].hyper, rate)
        self.stats.updates += 1
        self.stats.samples += samples
        self._step(mean, released)
        if self._correction:
            self._correction.updated()
            for worker in released:
                self._correction.released(worker)

    def _step(self, mean: Mean, released: Sequence[int]) -> None:
        """Steps with the mean of gradients, and sends each part of the parameters to `released` once it is made."""
        before: Callable[[Bucket | None], None] | None = mean.make
        if self.options.clip:
            mean.make()
            self._stepper.show(mean.gradients, mean.touched)
            self.options.clip(self.replica.trained)
            before = None
        in_buckets = released and self._stepper.in_buckets(mean.touched)
        for worker in released if in_buckets else ():
            self._write_release(worker)
            self._end.announce(worker)

        def send(place: int) -> None:
            for worker in released:
                self._end.send(worker, self._master.parts, place)

        self._stepper.step(mean.gradients, mean.touched, mean.rows, before=before, after=send if in_buckets else None)
        for worker in () if in_buckets else released:
            self._send_release(worker)

    def drop(self, worker: int) -> None:
        """Leaves the waiting gradient of `worker` out."""
        self.stats.workers[worker].dropped += self._slots[worker].take().nbytes > 0

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

    def release(self, worker: int, *, empty: bool = False) -> None:
        """Sends `worker` the parameters, or only leave to go on."""
        if not empty and self._correction:
            self._correction.released(worker)
        self._send_release(worker, empty=empty)

    def _send_release(self, worker: int, *, empty: bool = False) -> None:
        self._write_release(worker, empty=empty)
        self._end.release(worker, self._master.parts, empty=empty)

    def _write_release(self, worker: int, *, empty: bool = False) -> None:
        slot = self._slots[worker]
        if not empty:
            slot.version = self.stats.updates
        header = Header(
            Kind.RELEASE,
            sender=self._rank,
            layout=self.replica.layout,
            step=slot.step,
            version=slot.version,
            samples=self.stats.samples,
            nbytes=0 if empty else self._master.parts.nbytes,
            flags=Flag.STOP if self.stopping else Flag.NONE,
        )
        if self.draining:
            header.flags |= Flag.PREEMPT
        if self._rank and preempt.requested():
            header.flags |= Flag.ASKED
        header.pack_into(slot.release_header)


def _also(replica: Replica) -> str:
    """Returns what else may be the cure for a gradient that is not finite."""
    return "; fp16 overflows at 65504 on its way, bf16 does not" if str(replica.compression) == "fp16" else ""
