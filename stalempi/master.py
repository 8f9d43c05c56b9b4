"""Keeps the parameters that the server updates while releases of them may still be on their way."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from stalempi.pages import zeros
from stalempi.replica import Replica
from stalempi.transport.base import Parts

__all__ = ["MasterCopy"]

# How long a release may still read the parameters before an update gets a copy to work on instead of waiting (s).
_PATIENCE = 0.02


class MasterCopy:
    """The parameters, sent from where they lie and copied only if a release lingers.

    A release reads the very storage that the optimizer writes, so an update waits until none is on its way, which is
    normally at once. If one lingers (a paused or distant worker), it keeps the storage that it reads and the parameters
    move to another, so that nobody waits for that worker.

    Args:
        replica: the model.
        settle: (parts, seconds) -> whether no release reads `parts` any more, see `ServerEnd.settle`.

    Attributes:
        parts: the parameters as the next release carries them.
        moves: how often they had to move.
    """

    def __init__(self, replica: Replica, settle: Callable[[Parts, float], bool]) -> None:
        self._replica, self._settle = replica, settle
        self.parts = replica.release_parts()
        self.moves = 0
        self._lingering: list[tuple[list[Tensor], Parts]] = []

    @property
    def lingering(self) -> list[Tensor]:
        """The storages that the parameters have left."""
        return [storage for storages, _ in self._lingering for storage in storages]

    def make_room(self) -> None:
        """Makes sure that no release reads the parameters that are about to change."""
        if self._settle(self.parts, _PATIENCE):
            return
        self.moves += 1
        storages, parts = self._free() or (
            [zeros(len(s), s.dtype, s.device) for s in self._replica.params.storages],
            None,
        )
        old = self._replica.params.move(self._replica.trained, storages)
        self._lingering.append((old, self.parts))
        self.parts = parts or self._replica.release_parts()

    def _free(self) -> tuple[list[Tensor], Parts | None] | None:
        for place, (storages, parts) in enumerate(self._lingering):
            if self._settle(parts, 0.0):
                del self._lingering[place]
                return storages, parts
        return None
