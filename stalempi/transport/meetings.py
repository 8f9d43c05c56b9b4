"""Adds up over all ranks of an in-process job: the twin of the MPI side without a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from stalempi.transport.base import PeerEnd

__all__ = ["InprocPeerEnd", "Meetings"]

# What a rank brings: the tensor to add up, or its ticket and the place for everybody's.
Item: TypeAlias = "Tensor | tuple[bytearray, bytearray]"


@dataclass
class _Meeting:
    """One sum over all ranks, or one exchange: what each has brought so far, by rank."""

    brought: dict[int, Item] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Carries it out; all have brought something of the same kind."""
        items = [self.brought[rank] for rank in sorted(self.brought)]
        tensors = [item for item in items if isinstance(item, Tensor)]
        tickets = [item for item in items if isinstance(item, tuple)]
        if tensors:
            total = torch.stack(tensors).sum(0)
            for tensor in tensors:
                tensor.copy_(total)
        joined = b"".join(ticket for ticket, _ in tickets)
        for _, place in tickets:
            place[:] = joined
        self.done.set()


@dataclass
class Meetings:
    """Where `size` ranks meet, in the order in which each of them comes."""

    size: int
    _open: dict[int, _Meeting] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def bring(self, number: int, rank: int, item: Item) -> _Meeting:
        """Brings what `rank` has for its `number`-th meeting; the last to come carries it out."""
        with self._lock:
            meeting = self._open.setdefault(number, _Meeting())
            meeting.brought[rank] = item
            if len(meeting.brought) == self.size:
                del self._open[number]
                meeting.end()
        return meeting


class InprocPeerEnd(PeerEnd):
    """See `Transport.peer_end`."""

    def __init__(
        self, meetings: Meetings, rank: int, tickets: tuple[bytearray, bytearray], sums: Sequence[Tensor]
    ) -> None:
        self._meetings, self._rank, self._tickets, self._sums = meetings, rank, tickets, sums
        self._begun = 0
        self._on_way: list[_Meeting] = []

    def sum(self, place: int) -> None:
        self._bring(self._sums[place])

    def exchange(self) -> None:
        self._bring(self._tickets)

    def _bring(self, item: Item) -> None:
        self._on_way.append(self._meetings.bring(self._begun, self._rank, item))
        self._begun += 1

    def progress(self) -> None:
        pass

    def receive(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        if not all(meeting.done.wait(max(0.0, until - time.monotonic())) for meeting in self._on_way):
            return False
        self._on_way.clear()
        return True

    def close(self) -> None:
        pass
