"""Defines how bytes move between ranks: what MPI and its in-process twin both promise.

1. Nothing here blocks while a peer may be waiting: sends are nonblocking, receives are posted before the peer can send.
2. A buffer belongs to the transfer that uses it until that is complete.
3. A message is a header and parts. Parts may be sent empty (a leave, an empty push), never partly.
4. What arrives is checked against its header: kind, sender and bytes (the layout by server and worker). ProtocolError
   if it does not fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stalempi.errors import ProtocolError
from stalempi.transport.message import Header, Kind
from stalempi.transport.staging import Copied, Copier, copier_for

__all__ = [
    "Numbers",
    "Packet",
    "Parts",
    "PartwiseEnd",
    "PeerEnd",
    "ServerEnd",
    "Transport",
    "WorkerEnd",
    "check_received",
]

Numbers = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int64]


class Parts:
    """Contiguous 1-D uint8 tensors as they travel: themselves, or through pinned host memory.

    Args:
        tensors: all on one device.
        staged: whether they go through host memory; by default those on a GPU do, unless they go `direct`.
        direct: MPI takes the memory of their GPU.
        copier: copies beside the computation; that of their device by default.

    Attributes:
        tensors: where the values live.
        wire: what the transport reads and writes; the same tensors unless they are staged.
        nbytes: bytes of all; room for so many.
        lengths: bytes that are sent of a part, by its place, where those are fewer than there is room for.
        varies: whether any part may be sent so.
        staged: whether they go through host memory.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        staged: bool | None = None,
        direct: bool = False,
        copier: Copier | None = None,
        varies: bool = False,
    ) -> None:
        self.tensors = list(tensors)
        self.nbytes = sum(t.nbytes for t in self.tensors)
        self.lengths: dict[int, int] = {}
        self.varies = varies
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.staged = (device.type == "cuda" and not direct) if staged is None else staged
        self._copier = copier or copier_for(device)
        self.wire = [self._copier.mirror(t) for t in self.tensors] if self.staged else self.tensors

    @property
    def filled(self) -> int:
        """Bytes that are sent of all parts."""
        return self.nbytes - sum(self.tensors[place].nbytes - length for place, length in self.lengths.items())

    def sent(self, place: int) -> Tensor:
        """Returns what is sent of a part."""
        return self.wire[place][: self.lengths.get(place)]

    def outgoing(self, first: int = 0) -> Iterator[int]:
        """Yields each part's place as soon as `wire` holds its values, while those after it are still being copied.

        `first` is the place to begin with.
        """
        places = range(first, len(self.wire))
        if not self.staged:
            self._copier.mark().synchronize()
            yield from places
            return
        copies = [self.start(place) for place in places]
        for place, copied in zip(places, copies, strict=True):
            copied.synchronize()
            yield place

    def start(self, place: int) -> Copied:
        """Begins to make `wire` hold a part's values, as the computation's stream has them at this point."""
        if self.staged:
            return self._copier.copy_out(self.wire[place], self.tensors[place])
        return self._copier.mark()

    def stage_out(self) -> None:
        """Makes `wire` hold the values; returns when it does."""
        for _ in self.outgoing():
            pass

    def stage_in(self, first: int = 0, stop: int | None = None) -> None:
        """Brings what arrived in `wire`, at places from `first` to before `stop`, to the tensors; waits for it."""
        if self.staged:
            pairs = list(zip(self.wire, self.tensors, strict=True))[first:stop]
            copies = [self._copier.copy_in(here, host) for host, here in pairs]
            for copied in copies:
                copied.synchronize()

    def make_room(self) -> None:
        """Returns when no kernel that was started uses `wire`, so that a receive into it may be posted."""
        if not self.staged:
            self._copier.mark().synchronize()


class Packet:
    """The fixed place of one message between two ranks: header bytes and parts.

    Args:
        header_bytes: size of the header with what the caller appends to it.
        parts: the payload.
    """

    def __init__(self, header_bytes: int, parts: Parts) -> None:
        self.header = bytearray(header_bytes)
        self.parts = parts


class WorkerEnd(ABC):
    """A worker's side: one push out, one release in, again and again.

    Attributes:
        hidden: share of the latest push's bytes that had left when `push` was called.
        ahead_bytes: bytes of the parts that have gone ahead of a push that was not made.
    """

    hidden: float = 0.0
    ahead_bytes: int = 0

    @abstractmethod
    def part(self, place: int) -> None:
        """Begins to send the part at `place` of a push, ahead of `push`; the places go up from 0.

        The part stays unchanged until the push's release is whole. The push may then not be empty, but a leave may
        follow instead.
        """

    @abstractmethod
    def progress(self) -> None:
        """Lets what is on its way move on; cheap enough for every hook."""

    @abstractmethod
    def push(self, *, empty: bool = False) -> None:
        """Posts the receive of the release and sends the push packet, or only its header; returns at once.

        Parts that went ahead are not sent again.
        """

    @abstractmethod
    def receive(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until the release is whole and the push is gone; returns whether it is.

        Raises ProtocolError if the release does not fit its header.
        """

    @abstractmethod
    def leave(self, timeout: float) -> bool:
        """Sends the push packet's header (kind LEAVE); returns whether it went within `timeout`.

        Parts that have not gone ahead are sent empty; the header announces `ahead_bytes`.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees what the transport holds; nothing may be on its way."""


class PartwiseEnd(WorkerEnd):
    """A worker's side that can say which parts of a release are here."""

    @abstractmethod
    def receive_header(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until the release's header is here and the push is gone; returns whether it is.

        If it announces parts, `receive_part` may follow; `receive` must.
        """

    @abstractmethod
    def receive_part(self, place: int, timeout: float) -> bool:
        """Waits up to `timeout` seconds until the release's parts up to `place` are here; returns whether they are."""


class ServerEnd(ABC):
    """The server's side: pushes in from every worker, releases out."""

    @abstractmethod
    def receive(self, timeout: float) -> list[int]:
        """Waits up to `timeout` seconds for whole pushes or leaves and returns their workers; [] if none came.

        The packet of a worker returned belongs to the caller until the worker's next `release`. Raises ProtocolError
        if a message does not fit its header.
        """

    @abstractmethod
    def release(self, worker: int, parts: Parts, *, empty: bool = False) -> None:
        """Posts the receive of the worker's next push and sends it its release header and `parts`; returns at once.

        `parts` must stay unchanged until `settle(parts, ...)` returns True, unless they are sent `empty`.
        """

    @abstractmethod
    def announce(self, worker: int) -> None:
        """Sends `worker` its release header, whose parts follow by `send`; returns at once."""

    @abstractmethod
    def send(self, worker: int, parts: Parts, place: int) -> None:
        """Sends `worker`, after `announce`, the part at `place`, which then stays unchanged until `settle`.

        Places go up from 0. Before the last one, the receive of the worker's next push is posted. Returns at once.
        """

    @abstractmethod
    def settle(self, parts: Parts, timeout: float) -> bool:
        """Waits up to `timeout` seconds until no release reads `parts` any more; returns whether that is so."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Completes what is on its way (StallError after `timeout` seconds) and frees what the transport holds."""


class PeerEnd(ABC):
    """A rank's side where there is no server: sums over all ranks, each of which begins the same ones in one order."""

    @abstractmethod
    def sum(self, place: int) -> None:
        """Begins to replace the sums' tensor at `place` by its sum over all ranks; returns at once."""

    @abstractmethod
    def exchange(self) -> None:
        """Begins to give every rank's ticket to all; returns at once."""

    @abstractmethod
    def progress(self) -> None:
        """Lets what is on its way move on."""

    @abstractmethod
    def receive(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until all that was begun is complete; returns whether it is."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the transport holds; nothing may be on its way."""


class Transport(ABC):
    """What joins the ranks of a job; a server's and its workers' ends may be opened between any two ranks.

    Attributes:
        rank, size: place and number.
        description: the library in use, in words.
        direct: whether the memory of this rank's GPU is sent and received as it is.
        buffers: which memory messages are sent from, in words.
    """

    rank: int
    size: int
    description: str
    direct: bool = False
    buffers: str = "host memory"

    @abstractmethod
    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        """Gives every rank what every rank gave, by rank; StallError names the ranks missing after `timeout`."""

    @abstractmethod
    def broadcast(self, parts: Parts, timeout: float, root: int = 0) -> None:
        """Copies rank `root`'s `parts` to every other rank's; StallError after `timeout` seconds."""

    @abstractmethod
    def allreduce(self, values: Numbers, op: str, timeout: float) -> None:
        """Replaces host `values` (float32, float64 or int64) by the "sum", "min" or "max" over all ranks.

        Every rank gets the same bits. StallError after `timeout` seconds.
        """

    @abstractmethod
    def server_end(
        self, pushes: Sequence[Packet], releases: Sequence[bytearray], workers: Sequence[int] | None = None
    ) -> ServerEnd:
        """Opens a server's side with a push packet and a release header for each worker.

        `workers` are their ranks, 1 .. number of workers by default. A rank may serve some and be a worker of another.
        """

    @abstractmethod
    def worker_end(self, push: Packet, release: Packet, server: int = 0, *, thread: bool = False) -> WorkerEnd:
        """Opens a worker's side towards rank `server`.

        `thread`: parts that go ahead of a push are moved on by a thread too, not only by calls of `progress`.
        """

    @abstractmethod
    def peer_end(self, ticket: bytearray, tickets: bytearray, sums: Sequence[Tensor]) -> PeerEnd:
        """Opens this rank's side of a job without a server.

        Args:
            ticket: what this rank gives in an exchange.
            tickets: where every rank's arrives, by rank.
            sums: 1-D float32 or float64 tensors in host memory, of the same sizes on every rank.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the transport itself."""


def check_received(packet: Packet, *, sender: int, kinds: Sequence[Kind], arrived: int) -> Header:
    """Returns the header of a message that has arrived whole.

    Args:
        packet: where it arrived.
        sender: rank that it must come from.
        kinds: what it may be.
        arrived: bytes that the transport counted in the parts.

    Raises ProtocolError if sender, kind or bytes are not those announced.
    """
    header = Header.unpack(packet.header)
    if header.sender != sender or header.kind not in kinds:
        raise ProtocolError(
            f"expected {_names(kinds)} from rank {sender}, got {header.kind.name} of rank {header.sender}"
        )
    may_vary = packet.parts.varies or header.kind is Kind.LEAVE  # which may follow parts of a push that was not made
    fits = header.nbytes <= packet.parts.nbytes if may_vary else header.nbytes in (0, packet.parts.nbytes)
    if not fits or arrived != header.nbytes:
        raise ProtocolError(
            f"rank {sender} step {header.step}: {header.kind.name} announces {header.nbytes} bytes, {arrived} arrived, "
            f"{packet.parts.nbytes} are agreed on"
        )
    return header


def _names(kinds: Sequence[Kind]) -> str:
    return " or ".join(kind.name for kind in kinds)
