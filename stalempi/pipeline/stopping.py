"""Brings the wish to stop, which a signal puts to any one rank, to every block at the same batch."""

from __future__ import annotations

from collections.abc import Callable

from stalempi.pipeline.link import Lane, Receiver, Sender
from stalempi.pipeline.replicas import Replicas
from stalempi.pipeline.wiring import Wiring

__all__ = ["Stopping"]


class Stopping:
    """Knows on the first block of each copy whether the batch to come is to be the last.

    Whoever was asked tells rank 0. With one copy, rank 0 marks its next batch as the last; with several, the answer to
    the next update's gradients tells the first blocks of all copies, so that they stop at the same batch. The mark
    travels up the pipe with the batch.

    Args:
        wiring: of this block.
        copies: of this block; None if there is one.
        asked: whether this rank has been asked to stop.
    """

    def __init__(self, wiring: Wiring, copies: Replicas | None, asked: Callable[[], bool]) -> None:
        self._asked, self._copies = asked, copies
        self._is_root = wiring.is_first and wiring.replica == 0
        self._decides = wiring.is_first
        size = wiring.blocks * wiring.replicas
        self._to_root: Sender | None = None if self._is_root else wiring.to_root(Lane.STOP)
        self._from: list[Receiver] = [wiring.from_rank(r, Lane.STOP) for r in range(1, size)] if self._is_root else []
        self._told = False

    def now(self) -> bool:
        """Returns whether the batch that comes in now is to be the last one; asked at every step of every rank."""
        if self._to_root and self._asked() and not self._told:
            self._told = True
            self._to_root.send((0, 0), ())
        if not self._decides:
            return False
        if self._is_root and not self._told:
            self._told = self._asked() or any(receiver.ready() for receiver in self._from)
        if self._copies is None:
            return self._told
        self._copies.wants_stop = self._told
        return self._copies.stops

    def close(self) -> None:
        """Takes back what was posted for wishes that did not come."""
        for receiver in self._from:
            receiver.close()
