"""Takes a step: gradient -> push ... release -> new parameters; knows no MPI."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from stalempi import preempt
from stalempi.clip import Clip
from stalempi.early import EarlyBuckets, FiniteCheck
from stalempi.errors import ConfigError, ProtocolError, StallError
from stalempi.gradients import GradientBook
from stalempi.group import Group, LeaderEnd
from stalempi.places import Places
from stalempi.replica import Replica
from stalempi.transport.base import Packet, Transport, WorkerEnd
from stalempi.transport.message import HEADER_BYTES, Flag, Header, Kind

__all__ = ["OVERLAPS", "Worker"]

# How a push moves while backward makes it: MPI is called from the hooks of parameters, or from a thread too, or nothing
# is sent before `step`.
OVERLAPS = ("hooks", "thread", "off")


class Worker:
    """One worker of a data-parallel job.

    Args:
        replica: the model that the user computes gradients with; a release is received straight into it.
        transport: reaches the server.
        stall_timeout: seconds without a release before StallError.
        schedule, clip: the server's factor of the learning rate and its limits of a gradient, for the steps that this
            worker takes alone.
        group: whom it pushes to, and who pushes to it.
        note: returns what a checkpoint keeps of this worker, always as many bytes; None without checkpoints.
        overlap: how a push moves while backward makes it, see `OVERLAPS`.
        run_ahead: whether `step` returns before its release is here, so that the next iteration runs on the parameters
            that this worker has; the release is then taken in by the next `step`.

    Attributes:
        step_count: this worker's clock: pushes so far.
        version: updates in the parameters that the model now has.
        global_samples: samples of all workers that the server has applied.
        stopping: whether the server says that enough samples have been applied.
        preempted: whether the server says that the job ends, and has not applied the latest push.
        waited: seconds spent waiting for the latest release.
        owed: whether a push is out and its release has not come.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        replica: Replica,
        transport: Transport,
        *,
        stall_timeout: float,
        schedule: Callable[[int], float] | None = None,
        clip: Clip | None = None,
        group: Group | None = None,
        note: Callable[[], bytes] | None = None,
        overlap: str = "hooks",
        run_ahead: bool = False,
    ) -> None:
        self.replica = replica
        self.gradients = replica.params.like()
        self._rank, self._stall_timeout = transport.rank, stall_timeout
        self._schedule, self._clip = schedule, clip
        self._note = note
        self._run_ahead = run_ahead
        self._places = places = Places(replica, self.gradients, apart=run_ahead)
        self._push = replica.push_packet(places.wire, places.buffers, note_bytes=len(note()) if note else 0)
        self._release = Packet(HEADER_BYTES, replica.release_parts(places.params))
        self._hyper, self._touched = replica.hyper(self._push.header), replica.touched(self._push.header)
        group = group or Group()
        self._end: WorkerEnd = (
            LeaderEnd(replica, transport, group, self.gradients, self._push, self._release)
            if group.members
            else transport.worker_end(self._push, self._release, group.server, thread=overlap == "thread")
        )
        self.step_count = self.version = self.global_samples = 0
        self.stopping = self.preempted = False
        self.waited = 0.0
        self.owed = False
        self._early = EarlyBuckets(
            replica.trained,
            self.gradients,
            bucket_bytes=replica.bucket_bytes,
            overlap=overlap != "off" and not group.members and not run_ahead,
            cure="use overlap='off'",
        )
        self._finite = FiniteCheck()
        keeps_rest = replica.compression is not None and replica.compression.keeps_rest
        self._ever = np.zeros_like(self._touched) if keeps_rest else None  # what is left over may come at any step
        worth_it = self._early.may_be_early and len(self._early.slices) > 1  # one bucket is complete when all is
        watched = self._ready if run_ahead or worth_it else None
        self._book = GradientBook(replica.trained, self.gradients, on_ready=watched)
        if run_ahead:
            self._progress_in_forward()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Sets all gradients to zero and makes them views of the flat storage again."""
        self._early.zeroed()
        self._book.zero()

    def _ready(self, place: int) -> None:
        """Is told that backward has this parameter's gradient; sends what is complete."""
        for bucket in self._early.ready(place):
            self._encode(bucket)
            self._end.part(bucket)
        self._end.progress()

    def _encode(self, bucket: int) -> None:
        code = self._places.wire.codes[bucket]
        code.encode()
        self._finite.add(code.checked)

    def step(self, *, samples: int, loss: float = math.nan, scale: float = 1.0) -> None:
        """Pushes the gradient, which stands for `samples` samples, and returns with the new parameters in the model.

        A worker that runs ahead returns with those of the push before.

        The gradient is divided by `scale` first, in place, and then stays as it was pushed.

        Raises ConfigError without samples, StallError if the server is silent, ProtocolError if a release does not fit.
        """
        if samples < 1:
            raise ConfigError(f"a gradient stands for at least 1 sample, got {samples}: leave out steps without data")
        version = self._catch_up()
        if self.preempted:
            return  # what was computed meanwhile is in no checkpoint either
        self._book.collect(self._touched)
        if self._ever is not None:
            self._ever |= self._touched
            self._touched[:] = self._ever
        if scale != 1.0:
            for storage in self.gradients.storages:
                storage.mul_(1.0 / scale)
        self._early.judge()
        for bucket in self._early.rest():
            self._encode(bucket)
        self._hyper[:] = self.replica.read_hyper()
        header = self._header(Kind.PUSH, samples=samples, nbytes=self._push.parts.nbytes, loss=loss)
        header.version = version
        if not self._finite.verdict():
            header.flags = Flag.NONFINITE
            self._places.wire.clean()
        self._places.fill()
        self._exchange(header)

    def skip(self, *, loss: float = math.nan) -> None:
        """Sends an empty push: the clock goes on and a release comes, but there is no gradient in this step."""
        if self._early.handed:
            raise ConfigError("a step was left out whose gradient backward had begun to send: use overlap='off'")
        version = self._catch_up()
        if self.preempted:
            return
        header = self._header(Kind.PUSH, loss=loss)
        header.version = version
        self._exchange(header)

    def _catch_up(self) -> int:
        """Takes in the release that this worker ran ahead of; returns the version that it has computed on meanwhile."""
        version = self.version
        if self.owed:
            self._await_release()
        return version

    def _progress_in_forward(self) -> None:
        """Lets messages move while the model runs forward, as hooks of the parameters do while it runs backward."""
        for module in self.replica.model.modules():
            if not any(module.children()):
                module.register_forward_pre_hook(lambda *_: self._end.progress())

    def _exchange(self, header: Header) -> None:
        header.step = self.step_count = self.step_count + 1
        if preempt.requested():
            header.flags |= Flag.PREEMPT
        self._send(header)
        self._early.begin()
        if not self._run_ahead:
            self._await_release()

    def go_on_from(self, step_count: int) -> None:
        """Makes its clock, and its group's, what it was when the checkpoint was taken."""
        self.step_count = step_count
        if isinstance(self._end, LeaderEnd):
            self._end.clock = step_count

    def rejoin(self) -> None:
        """Waits for the release that was due to this worker when the checkpoint was taken that it goes on from."""
        header = self._header(Kind.PUSH)
        header.flags = Flag.WAITING
        self._send(header)
        self._await_release()

    def _send(self, header: Header) -> None:
        header.pack_into(self._push.header)
        self._write_note()
        self._pushed = header
        self.owed = True
        self._end.push(empty=not header.nbytes)

    def _write_note(self) -> None:
        if self._note:
            self.replica.note(self._push)[:] = self._note()

    def leave(self) -> None:
        """Tells the server that this worker has no more data; returns once that is on its way."""
        if self.owed:
            self._await_release()
        self._header(Kind.LEAVE).pack_into(self._push.header)
        self._write_note()
        if not self._end.leave(self._stall_timeout):
            raise StallError(f"rank {self._rank}: the server did not take the leave within {self._stall_timeout:g} s")
        self._end.close()
        if isinstance(self._end, LeaderEnd):
            self.preempted = self._end.preempted

    def _header(self, kind: Kind, *, samples: int = 0, nbytes: int = 0, loss: float = math.nan) -> Header:
        return Header(
            kind,
            sender=self._rank,
            layout=self.replica.layout,
            step=self.step_count,
            version=self.version,
            samples=samples,
            nbytes=nbytes,
            loss=loss,
            waited=self.waited,
            hidden=self._end.hidden,
        )

    def _await_release(self) -> None:
        began = time.perf_counter()
        if not self._end.receive(self._stall_timeout):
            raise StallError(
                f"rank {self._rank} step {self.step_count}: no release from the server within {self._stall_timeout:g} s"
            )
        self.waited = time.perf_counter() - began
        self.owed = False
        header = Header.unpack(self._release.header)
        if header.step != self.step_count or header.layout != self.replica.layout:
            raise ProtocolError(f"rank {self._rank} step {self.step_count}: got the release of step {header.step}")
        self.version, self.global_samples = header.version, header.samples
        if header.nbytes:
            self._places.take_in()
        self.stopping = bool(header.flags & Flag.STOP)
        self.preempted = bool(header.flags & Flag.PREEMPT)
        alone = not header.nbytes and self._pushed.nbytes and not self._pushed.flags & Flag.NONFINITE
        if alone and not self.preempted:
            self._step_alone()

    def _step_alone(self) -> None:
        """Goes on with the parameters it has, its own update made here as the server made it (read-my-writes)."""
        self._places.wire.decode()
        gradients = [parameter.grad for parameter in self.replica.trained]
        for parameter, has_gradient in zip(self.replica.trained, self._touched, strict=True):
            if not has_gradient:
                parameter.grad = None
        factor = self._schedule(self.global_samples - self._pushed.samples) if self._schedule else 1.0
        if self._clip:
            self._clip(self.replica.trained)
        self.replica.step_with(self.replica.read_hyper(), factor)
        for parameter, gradient in zip(self.replica.trained, gradients, strict=True):
            parameter.grad = gradient
