"""Packs and unpacks the header that goes before every push and every release."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from stalempi.errors import ProtocolError

__all__ = ["HEADER_BYTES", "Buffer", "Flag", "Header", "Kind", "Tag"]

Buffer = bytearray | memoryview


class Kind(enum.IntEnum):
    """What a message is."""

    PUSH = 1
    RELEASE = 2
    LEAVE = 3


class Flag(enum.IntEnum):
    """What else a header says, a bit each; together they are a plain int, which is cheaper than an enum of flags."""

    NONE = 0
    STOP = 1  # on a release: enough global samples, leave now
    NONFINITE = 2  # on a push: the gradient holds a NaN or an infinity
    PREEMPT = 4  # on a push: this rank was asked to end; on a release: the job ends, and the push was not applied
    WAITING = 8  # on a push: no gradient; this worker's was applied before the checkpoint, and its release is due
    ASKED = 16  # on a release: this server, not rank 0, was asked to end; the worker's next push tells rank 0


class Tag(enum.IntEnum):
    """MPI tags, one per class of message: small and constant, since MPI guarantees no more than 32767."""

    PUSH_HEADER = 1
    PUSH_PART = 2
    RELEASE_HEADER = 3
    RELEASE_PART = 4
    STATE = 5
    PROBE = 6
    NOBODY = 63  # no message ever has it: whoever looks for one only lets MPI move the others


# magic, kind, sender, layout | step, version, samples, nbytes | loss, waited, hidden | flags
_FORMAT = struct.Struct("<4sBxxxII QQQQ ddd Q")
_MAGIC = b"SMP1"
HEADER_BYTES = _FORMAT.size


@dataclass(slots=True)
class Header:
    """The fixed part of a push or a release.

    Attributes:
        kind: what the message is.
        sender: rank that sent it.
        layout: checksum of the layout (names, shapes, dtypes) that both sides agreed on.
        step: clock of the worker concerned, after counting this push.
        version: updates in the parameters: on a push those that the gradient was computed on, on a release those sent.
        samples: on a push, samples that the gradient stands for; on a release, global samples so far.
        nbytes: bytes of all parts that follow; 0 when they are sent empty.
        loss: the worker's loss, NaN when unknown.
        waited: seconds that the worker waited for its last release.
        hidden: share of the last push's bytes that had left when its backward was over.
        flags: the sum of what holds, see `Flag`.
    """

    kind: Kind
    sender: int
    layout: int
    step: int
    version: int = 0
    samples: int = 0
    nbytes: int = 0
    loss: float = float("nan")
    waited: float = 0.0
    hidden: float = 0.0
    flags: int = Flag.NONE

    def pack_into(self, buffer: Buffer) -> None:
        """Writes the header to the first HEADER_BYTES of `buffer`."""
        _FORMAT.pack_into(
            buffer,
            0,
            _MAGIC,
            self.kind,
            self.sender,
            self.layout,
            self.step,
            self.version,
            self.samples,
            self.nbytes,
            self.loss,
            self.waited,
            self.hidden,
            self.flags,
        )

    @classmethod
    def unpack(cls, buffer: Buffer) -> Header:
        """Reads a header; ProtocolError if the bytes are not one."""
        magic, kind, sender, layout, step, version, samples, nbytes, *rest, flags = _FORMAT.unpack_from(buffer)
        if magic != _MAGIC:
            raise ProtocolError(f"a message begins with {magic!r} instead of {_MAGIC!r}: a peer runs another program")
        try:
            known = Kind(kind)
        except ValueError:
            raise ProtocolError(f"rank {sender} sent a message of unknown kind {kind}") from None
        loss, waited, hidden = rest
        return cls(known, sender, layout, step, version, samples, nbytes, loss, waited, hidden, flags)
