"""Defines how bytes move between ranks: what MPI and its in-process twin both promise.

1. Nothing here blocks while a peer may be waiting: sends are nonblocking, receives are posted before the peer can send.
2. A buffer belongs to the transfer that uses it until that is complete.
3. A message is a header and parts. Parts may be sent empty (a leave, an empty push), never partly.
4. What arrives is checked against its header: kind, sender and bytes (the layout by server and worker). ProtocolError
   if it does not fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from stalempi.errors import ProtocolError
from stalempi.transport.message import Header, Kind

__all__ = ["Packet", "Parts", "ServerEnd", "Transport", "WorkerEnd", "check_received"]


class Parts:
    """Contiguous 1-D uint8 tensors as they travel: themselves, or through pinned host memory if they are on a GPU.

    Attributes:
        tensors: where the values live.
        wire: what the transport reads and writes; the same tensors unless they are staged.
    """

    def __init__(self, tensors: Sequence[Tensor], *, staged: bool | None = None) -> None:
        self.tensors = list(tensors)
        self.nbytes = sum(t.nbytes for t in self.tensors)
        self._on_gpu = any(t.is_cuda for t in self.tensors)
        self.staged = self._on_gpu if staged is None else staged
        self.wire = [self._mirror(t) for t in self.tensors] if self.staged else self.tensors

    def _mirror(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)

    def stage_out(self) -> None:
        """Makes `wire` hold the values; returns when it does."""
        if self.staged:
            for tensor, mirror in zip(self.tensors, self.wire, strict=True):
                mirror.copy_(tensor, non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def stage_in(self) -> None:
        """Brings what arrived in `wire` to the tensors."""
        if self.staged:
            for tensor, mirror in zip(self.tensors, self.wire, strict=True):
                tensor.copy_(mirror, non_blocking=True)
            if self._on_gpu:
                torch.cuda.current_stream().synchronize()


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
    """A worker's side: one push out, one release in, again and again."""

    @abstractmethod
    def push(self, *, empty: bool = False) -> None:
        """Posts the receive of the release and sends the push packet, or only its header; returns at once."""

    @abstractmethod
    def receive(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until the release is whole and the push is gone; returns whether it is.

        Raises ProtocolError if the release does not fit its header.
        """

    @abstractmethod
    def leave(self, timeout: float) -> bool:
        """Sends the push packet's header (kind LEAVE) with empty parts; returns whether it went within `timeout`."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the transport holds; nothing may be on its way."""


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
    def settle(self, parts: Parts, timeout: float) -> bool:
        """Waits up to `timeout` seconds until no release reads `parts` any more; returns whether that is so."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Completes what is on its way (StallError after `timeout` seconds) and frees what the transport holds."""


class Transport(ABC):
    """What joins the ranks of a job; rank 0 is the server.

    Attributes:
        rank, size: place and number.
        description: the library in use, in words.
    """

    rank: int
    size: int
    description: str

    @abstractmethod
    def allgather(self, data: bytes, timeout: float) -> list[bytes]:
        """Gives every rank what every rank gave, by rank; StallError names the ranks missing after `timeout`."""

    @abstractmethod
    def broadcast(self, parts: Parts, timeout: float) -> None:
        """Copies the server's `parts` to every worker's; StallError after `timeout` seconds."""

    @abstractmethod
    def server_end(self, pushes: Sequence[Packet], releases: Sequence[bytearray]) -> ServerEnd:
        """Opens the server's side with a push packet and a release header for each worker."""

    @abstractmethod
    def worker_end(self, push: Packet, release: Packet) -> WorkerEnd:
        """Opens a worker's side."""

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
    if header.nbytes not in (0, packet.parts.nbytes) or arrived != header.nbytes:
        raise ProtocolError(
            f"rank {sender} step {header.step}: {header.kind.name} announces {header.nbytes} bytes, {arrived} arrived, "
            f"{packet.parts.nbytes} are agreed on"
        )
    return header


def _names(kinds: Sequence[Kind]) -> str:
    return " or ".join(kind.name for kind in kinds)
