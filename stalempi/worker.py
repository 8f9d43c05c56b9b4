"""Takes a step: gradient -> push ... release -> new parameters; knows no MPI."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from stalempi import preempt
from stalempi.arrival import Arrival, hookable
from stalempi.clip import Clip
from stalempi.early import FiniteCheck
from stalempi.errors import ConfigError, ProtocolError, StallError
from stalempi.group import Group, LeaderEnd
from stalempi.replica import Replica
from stalempi.share import Share
from stalempi.transport.base import Transport
from stalempi.transport.message import Flag, Header, Kind

__all__ = ["OVERLAPS", "Worker"]

T = TypeVar("T")
# How a push moves while backward makes it: MPI is called from the hooks of parameters and from a thread, or only from
# the hooks, or nothing is sent before `step`.
OVERLAPS = ("thread", "hooks", "off")


class Worker:
    """One worker of a data-parallel job.

    Args:
        replicas: the model that the user computes gradients with, by the server that holds each share of it; a release
            is received straight into it.
        transport: reaches the servers.
        stall_timeout: seconds without a release before StallError.
        schedule, clip: the server's factor of the learning rate and its limits of a gradient, for the steps that this
            worker takes alone.
        group: whom it pushes to, and who pushes to it; with several servers these are ranks 0 and up.
        note: returns what a checkpoint keeps of this worker, always as many bytes; None without checkpoints.
        overlap: how a push moves while backward makes it, see `OVERLAPS`.
        run_ahead: whether `step` returns before its release is here, so that the next iteration runs on the parameters
            that this worker has; the release is then taken in by the next `step`.
        early_forward: whether `step` returns when its release begins to arrive, so that each module of the model waits
            for its own parameters; not in a group.

    Attributes:
        shares: what it exchanges with each server.
        step_count: this worker's clock: pushes so far.
        version: updates in the parameters that the model now has.
        global_samples: samples of all workers that the server has applied.
        stopping: whether the server says that enough samples have been applied.
        preempted: whether the server says that the job ends, and has not applied the latest push.
        waited: seconds spent waiting for the latest release.
        owed: whether a push is out and its release has not come.
        arriving: whether a release is here in part.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        replicas: Sequence[Replica],
        transport: Transport,
        *,
        stall_timeout: float,
        schedule: Callable[[int], float] | None = None,
        clip: Clip | None = None,
        group: Group | None = None,
        note: Callable[[], bytes] | None = None,
        overlap: str = "thread",
        run_ahead: bool = False,
        early_forward: bool = False,
    ) -> None:
        self._rank, self._stall_timeout = transport.rank, stall_timeout
        self._schedule, self._clip = schedule, clip
        self._note, self._run_ahead = note, run_ahead
        self._finite = FiniteCheck()
        group = group or Group()
        self.shares = [
            Share(
                replica,
                transport,
                group=group if len(replicas) == 1 else Group(number),
                finite=self._finite,
                overlap=overlap,
                run_ahead=run_ahead,
                note_bytes=len(note()) if note and number == 0 else 0,
                before_part=self.finish,
            )
            for number, replica in enumerate(replicas)
        ]
        self.step_count = self.version = self.global_samples = 0
        self.stopping = self.preempted = False
        self._asked = False  # a server that rank 0 does not hear of was asked to end
        self.waited = 0.0
        self.owed = self.arriving = False
        self._arrival = Arrival(replicas, self._await_part) if early_forward else None
        if early_forward:
            replicas[0].model.register_state_dict_pre_hook(self.finish)
        if run_ahead or early_forward:
            self._progress_in_forward()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Sets all gradients to zero and makes them views of the flat storage again."""
        for share in self.shares:
            share.zero_grad()

    def step(self, *, samples: int, loss: float = math.nan, scale: float = 1.0) -> None:
        """Pushes the gradient, which stands for `samples` samples, and returns with the new parameters in the model.

        A worker that runs ahead returns with those of the push before.

        The gradient is divided by `scale` first, in place, and then stays as it was pushed.

        Raises ConfigError without samples, StallError if the server is silent, ProtocolError if a release does not fit.
        """
        if samples < 1:
            raise ConfigError(f"a gradient stands for at least 1 sample, got {samples}: leave out steps without data")
        self.finish()
        version = self._catch_up()
        if self.preempted:
            return  # what was computed meanwhile is in no checkpoint either
        for share in self.shares:
            share.collect(scale)
        flags: int = Flag.NONE
        if not self._finite.verdict():
            flags = Flag.NONFINITE
            for share in self.shares:
                share.clean()
        self._exchange(Kind.PUSH, flags, version=version, samples=samples, loss=loss)
        if self._arrival:
            self._arrival.learn()

    def skip(self, *, loss: float = math.nan) -> None:
        """Sends an empty push: the clock goes on and a release comes, but there is no gradient in this step."""
        if any(share.buckets.handed for share in self.shares):
            raise ConfigError("a step was left out whose gradient backward had begun to send: use overlap='off'")
        self.finish()
        version = self._catch_up()
        if not self.preempted:
            self._exchange(Kind.PUSH, Flag.NONE, version=version, loss=loss)

    def _catch_up(self) -> int:
        """Takes in the release that this worker ran ahead of; returns the version that it has computed on meanwhile."""
        version = self.version
        if self.owed:
            self._await_release()
        return version

    def _progress_in_forward(self) -> None:
        """Lets messages move while the model runs forward, as hooks of the parameters do while it runs backward."""
        for module in hookable(self.shares[0].replica.model):
            if not any(module.children()):
                module.register_forward_pre_hook(self._progress)

    def _progress(self, *_: object) -> None:
        if self.owed or self.arriving:
            for share in self.shares:
                share.end.progress()

    def _exchange(self, kind: Kind, flags: int, *, version: int, samples: int = 0, loss: float = math.nan) -> None:
        self.step_count += 1
        if preempt.requested() or self._asked:
            flags |= Flag.PREEMPT
        self._send(kind, flags, version=version, samples=samples, loss=loss)
        if self._arrival and self._arrival.may_begin:
            self._await_headers(self._arrival.first)
        elif not self._run_ahead:
            self._await_release()

    def go_on_from(self, step_count: int) -> None:
        """Makes its clock, and its group's, what it was when the checkpoint was taken."""
        self.step_count = step_count
        if isinstance(self.shares[0].end, LeaderEnd):
            self.shares[0].end.clock = step_count

    def rejoin(self) -> None:
        """Waits for the release that was due to this worker when the checkpoint was taken that it goes on from."""
        self._send(Kind.PUSH, Flag.WAITING, version=self.version)
        self._await_release()

    def _send(self, kind: Kind, flags: int, *, version: int, samples: int = 0, loss: float = math.nan) -> None:
        note = self._note() if self._note else None
        self.owed = True
        for share in self.shares:
            header = self._header(kind, flags, version=version, samples=samples, loss=loss)
            share.push(header, note, empty=not samples)
            note = None

    def leave(self) -> None:
        """Tells the servers that this worker has no more data; returns once that is on its way."""
        self.finish()
        if self.owed:
            self._await_release()
        note = self._note() if self._note else None
        for share in self.shares:
            if not share.leave(self._header(Kind.LEAVE, Flag.NONE, version=self.version), note, self._stall_timeout):
                raise StallError(
                    f"rank {self._rank}: the server did not take the leave within {self._stall_timeout:g} s"
                )
            share.end.close()
            note = None
        if isinstance(self.shares[0].end, LeaderEnd):
            self.preempted = self.shares[0].end.preempted

    def _header(self, kind: Kind, flags: int, *, version: int, samples: int = 0, loss: float = math.nan) -> Header:
        return Header(
            kind,
            sender=self._rank,
            layout=0,
            step=self.step_count,
            version=version,
            samples=samples,
            loss=loss,
            waited=self.waited,
            hidden=self._hidden(),
            flags=flags,
        )

    def _hidden(self) -> float:
        """Returns the share of the last push's bytes, to all servers, that had left when backward was over."""
        if len(self.shares) == 1:
            return self.shares[0].end.hidden
        nbytes = max(1, sum(share.nbytes for share in self.shares))
        return sum(share.end.hidden * share.nbytes for share in self.shares) / nbytes

    def finish(self, *_: object) -> None:
        """Returns when the latest release is in the model as a whole, if it is here in part.

        Raises StallError, ProtocolError as `step` does.
        """
        if not self.arriving:
            return
        began = time.perf_counter()
        for share in self.shares:
            self._due(share, began, share.receive)
        self.arriving = False
        self.waited += time.perf_counter() - began

    def _await_headers(self, first: Mapping[int, int]) -> None:
        """Waits until the release begins to arrive, with the parts that each server's are in `first` up to a place."""
        began = time.perf_counter()
        headers = [self._due(share, began, share.receive_header) for share in self.shares]
        self.arriving = True
        if any(header.nbytes for header in headers):
            for server, place in first.items():
                self._await_part(server, place)
        else:
            self.finish()
        self.waited = time.perf_counter() - began
        self._take(headers)

    def _await_part(self, server: int, place: int) -> None:
        """Returns when the part at `place` of a server's release is in the model."""
        if not self.arriving:
            return
        began, share = time.perf_counter(), self.shares[server]
        self._due(share, began, lambda timeout: share.receive_part(place, timeout) or None)
        self.waited += time.perf_counter() - began

    def _await_release(self) -> None:
        began = time.perf_counter()
        headers = [self._due(share, began, share.receive) for share in self.shares]
        self.waited = time.perf_counter() - began
        self._take(headers)

    def _take(self, headers: Sequence[Header]) -> None:
        """Does what the servers' releases say."""
        self.owed = False
        header = headers[0]
        if len(headers) > 1:
            self._asked = self._asked or any(h.flags & Flag.ASKED for h in headers)
            if len({(h.version, h.samples, h.flags & ~Flag.ASKED) for h in headers}) > 1:
                raise ProtocolError(f"rank {self._rank} step {self.step_count}: the servers' releases differ")
        self.version, self.global_samples = header.version, header.samples
        self.stopping = bool(header.flags & Flag.STOP)
        self.preempted = bool(header.flags & Flag.PREEMPT)
        pushed = self.shares[0].pushed
        alone = not header.nbytes and pushed.nbytes and not pushed.flags & Flag.NONFINITE
        if alone and not self.preempted:
            self._step_alone(pushed.samples)

    def _due(self, share: Share, began: float, receive: Callable[[float], T | None]) -> T:
        """Returns what comes from a share's server; StallError if nothing has within the timeout since `began`."""
        found = receive(max(0.0, began + self._stall_timeout - time.perf_counter()))
        if found is None:
            self.owed = True  # whoever leaves need not wait for it again
            number = self.shares.index(share)
            which = "the server" if len(self.shares) == 1 else f"server {number}"
            raise StallError(
                f"rank {self._rank} step {self.step_count}: no release from {which} within {self._stall_timeout:g} s"
            )
        return found

    def _step_alone(self, samples: int) -> None:
        """Goes on with the parameters it has, its own update made here as the server made it (read-my-writes)."""
        (share,) = self.shares  # several servers and cached pulls do not go together
        replica, touched = share.replica, share.as_sent()
        gradients = [parameter.grad for parameter in replica.trained]
        for parameter, has_gradient in zip(replica.trained, touched, strict=True):
            if not has_gradient:
                parameter.grad = None
        factor = self._schedule(self.global_samples - samples) if self._schedule else 1.0
        if self._clip:
            self._clip(replica.trained)
        replica.step_with(replica.read_hyper(), factor)
        for parameter, gradient in zip(replica.trained, gradients, strict=True):
            parameter.grad = gradient
