"""Holds what a worker exchanges with one server: its share of gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stalempi.early import EarlyBuckets, FiniteCheck
from stalempi.errors import ProtocolError
from stalempi.gradients import GradientBook
from stalempi.group import Group, LeaderEnd
from stalempi.places import Places
from stalempi.replica import Replica
from stalempi.transport.base import Packet, PartwiseEnd, Transport, WorkerEnd
from stalempi.transport.message import HEADER_BYTES, Header

__all__ = ["Share"]


class Share:
    """A worker's side of one server.

    Args:
        replica: the parameters that this server holds.
        transport: reaches it.
        group: whom this worker pushes to, and who pushes to it.
        finite: told each bucket that is sent.
        overlap, run_ahead: see `Worker`.
        note_bytes: bytes of the note in each push.
        before_part: called before a part leaves during backward.

    Attributes:
        gradients: of those parameters, flat.
        buckets: says which of them may leave before `step`.
        end: the transport's side.
        pushed: the header of the latest push.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        replica: Replica,
        transport: Transport,
        *,
        group: Group,
        finite: FiniteCheck,
        overlap: str,
        run_ahead: bool,
        note_bytes: int,
        before_part: Callable[[], object],
    ) -> None:
        self.replica, self._finite, self._before_part = replica, finite, before_part
        self.gradients = replica.params.like()
        self._places = places = Places(replica, self.gradients, apart=run_ahead)
        self._push = replica.push_packet(places.wire, places.buffers, note_bytes=note_bytes)
        self._release = Packet(HEADER_BYTES, replica.release_parts(places.params))
        self._hyper, self._touched = replica.hyper(self._push.header), replica.touched(self._push.header)
        self.end: WorkerEnd = (
            LeaderEnd(replica, transport, group, self.gradients, self._push, self._release)
            if group.members
            else transport.worker_end(self._push, self._release, group.server, thread=overlap == "thread")
        )
        self.buckets = EarlyBuckets(
            replica.trained,
            self.gradients,
            bucket_bytes=replica.bucket_bytes,
            overlap=overlap != "off" and not group.members and not run_ahead,
            cure="use overlap='off'",
            alone=replica.sparse,
        )
        keeps_rest = replica.compression is not None and replica.compression.keeps_rest
        self._ever = np.zeros_like(self._touched) if keeps_rest else None  # what is left over may come at any step
        worth_it = self.buckets.may_be_early and len(self.buckets.slices) > 1  # one bucket is complete when all is
        watched = self._ready if run_ahead or worth_it else None
        self._book = GradientBook(replica.trained, self.gradients, on_ready=watched, rows=places.wire.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the push that was collected."""
        return self._push.parts.filled

    def zero_grad(self) -> None:
        """Sets all gradients to zero and makes them views of the flat storage again."""
        self.buckets.zeroed()
        self._book.zero()

    def _ready(self, place: int) -> None:
        """Is told that backward has this parameter's gradient; sends what is complete."""
        for bucket in self.buckets.ready(place):
            self._before_part()
            self._encode(bucket)
            self.end.part(bucket)
        self.end.progress()

    def _encode(self, bucket: int) -> None:
        code = self._places.wire.codes[bucket]
        code.encode()
        self._finite.add(code.checked)

    def collect(self, scale: float) -> None:
        """Brings the gradient, divided by `scale`, and the hyper-parameters to where they are sent from.

        Raises ConfigError if some of it was sent and is not as it was.
        """
        self._book.collect(self._touched)
        if self._ever is not None:
            self._ever |= self._touched
            self._touched[:] = self._ever
        if scale != 1.0:
            for storage in self.gradients.storages:
                storage.mul_(1.0 / scale)
        self.buckets.judge()
        for bucket in self.buckets.rest():
            self._encode(bucket)
        self._push.parts.lengths = self._places.wire.lengths
        self._hyper[:] = self.replica.read_hyper()

    def clean(self) -> None:
        """Forgets what is not finite of a gradient that was not."""
        self._places.wire.clean()

    def push(self, header: Header, note: bytes | None, *, empty: bool) -> None:
        """Sends what was collected, or only the header; returns at once."""
        header.layout, header.nbytes = self.replica.layout, 0 if empty else self.nbytes
        self._write(header, note)
        self.pushed = header
        if not empty:
            self._places.fill()
        self.end.push(empty=empty)
        self.buckets.begin()

    def leave(self, header: Header, note: bytes | None, timeout: float) -> bool:
        """Says that this worker has no more data; returns whether that went within `timeout` seconds."""
        header.layout, header.nbytes = self.replica.layout, self.end.ahead_bytes
        self._write(header, note)
        return self.end.leave(timeout)

    def _write(self, header: Header, note: bytes | None) -> None:
        header.pack_into(self._push.header)
        if note:
            self.replica.note(self._push)[:] = note

    def receive(self, timeout: float) -> Header | None:
        """Returns the header of the release, whose parameters are in the model then; None if none came in time.

        Raises ProtocolError if it is not the one that is due.
        """
        if not self.end.receive(timeout):
            return None
        header = self._read_header()
        if header.nbytes:
            self._places.take_in()
        return header

    def receive_header(self, timeout: float) -> Header | None:
        """Returns the header of the release, whose parts may still be on their way; None if none came in time.

        Raises ProtocolError if it is not the one that is due.
        """
        assert isinstance(self.end, PartwiseEnd), "in a group releases come whole"
        return self._read_header() if self.end.receive_header(timeout) else None

    def receive_part(self, place: int, timeout: float) -> bool:
        """Waits until the release's parts up to `place` are in the model; returns whether they are."""
        assert isinstance(self.end, PartwiseEnd), "in a group releases come whole"
        return self.end.receive_part(place, timeout)

    def _read_header(self) -> Header:
        header = Header.unpack(self._release.header)
        if header.step != self.pushed.step or header.layout != self.replica.layout:
            raise ProtocolError(
                f"rank {self.pushed.sender} step {self.pushed.step}: got the release of step {header.step}"
            )
        return header

    def as_sent(self) -> list[bool]:
        """Makes the gradients what the server reads of them; returns which parameters have one."""
        self._places.wire.decode()
        return [bool(touched) for touched in self._touched]
