"""Keeps workers that wait for the least count to rise, in buckets keyed by the count that each needs."""

from __future__ import annotations

from typing import Any

__all__ = ["Gate"]


class Gate:
    """Holds workers until the least count m reaches what each of them needs.

    A push that does not move m costs nothing here, and one that does opens the buckets up to the new m: constant time
    per worker held, whatever their number, plus the sort of those who go.
    """

    def __init__(self) -> None:
        self._least = 0
        self._buckets: dict[int, set[int]] = {}
        self._need: dict[int, int] = {}

    def hold(self, worker: int, need: int) -> None:
        """Holds `worker` until m >= `need`."""
        assert worker not in self._need
        assert need > self._least
        self._need[worker] = need
        self._buckets.setdefault(need, set()).add(worker)

    def discard(self, worker: int) -> None:
        """Forgets `worker`, held or not."""
        need = self._need.pop(worker, None)
        if need is not None:
            self._buckets[need].discard(worker)

    def state(self) -> dict[str, Any]:
        """Returns who needs what, as plain values."""
        return {"least": self._least, "held": [[worker, need] for worker, need in self._need.items()]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Holds the workers of a `state`; this gate holds nobody yet."""
        self._least = int(state["least"])
        for worker, need in state["held"]:
            self.hold(int(worker), int(need))

    def open(self, least: int) -> list[int]:
        """Returns the workers, ascending, that m = `least` lets go; they are held no longer."""
        freed: list[int] = []
        for need in range(self._least + 1, least + 1):
            freed.extend(self._buckets.pop(need, ()))
        self._least = max(self._least, least)
        for worker in freed:
            del self._need[worker]
        freed.sort()
        return freed
