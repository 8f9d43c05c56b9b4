"""Brings a wish, to stop or to pause, to every block at the same batch, whichever rank has it."""

from __future__ import annotations

from collections.abc import Callable

from stalempi.pipeline.link import Lane, Note, Receiver, Sender
from stalempi.pipeline.replicas import Replicas
from stalempi.pipeline.wiring import Wiring

__all__ = ["Wishes"]


class Wishes:
    """Decides on the first block of each copy what the batch to come tells the others.

    Whoever is asked to stop tells rank 0. With one copy, rank 0 puts the note on its next batch; with several, the
    answer to the next update's gradients brings it to the first blocks of all copies, which put it on the same batch.
    From there it travels up the pipe with the batch.

    Args:
        wiring: of this block.
        copies: of this block; None if there is one.
        stop: whether this rank has been asked to stop.
        pause: whether the pipe is to be emptied; asked on rank 0.
    """

    def __init__(
        self, wiring: Wiring, copies: Replicas | None, *, stop: Callable[[], bool], pause: Callable[[], bool]
    ) -> None:
        self._copies, self._stop, self._pause = copies, stop, pause
        self._is_root = wiring.is_first and wiring.replica == 0
        self._decides = wiring.is_first
        size = wiring.blocks * wiring.replicas
        self._to_root: Sender | None = None if self._is_root else wiring.to_root(Lane.STOP)
        self._from: list[Receiver] = [wiring.from_rank(r, Lane.STOP) for r in range(1, size)] if self._is_root else []
        self._told = False

    def now(self) -> Note:
        """Returns what the batch that comes in now says; called in every step of every rank."""
        if self._to_root and self._stop() and not self._told:
            self._told = True
            self._to_root.send((0, 0), ())
        if not self._decides:
            return Note.NONE
        wish = self._wish() if self._is_root else Note.NONE
        if self._copies is None:
            return wish
        self._copies.wish = max(self._copies.wish, wish)  # not each step makes an update that takes it along
        note, self._copies.note = self._copies.note, Note.NONE
        return note

    def close(self) -> None:
        """Takes back what was posted for wishes that did not come."""
        for receiver in self._from:
            receiver.close()

    def _wish(self) -> Note:
        self._told = self._told or self._stop() or any(receiver.ready() for receiver in self._from)
        return Note.STOP if self._told else Note.PAUSE if self._pause() else Note.NONE
