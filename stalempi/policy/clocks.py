"""Counts pushes and keeps the least and the largest count: c_p, m and the gap c_p - m."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from stalempi.errors import ProtocolError

__all__ = ["Clocks"]


class Clocks:
    """Counts pushes per worker and keeps the least count in constant time per push.

    Args:
        num_workers: workers 0 .. num_workers - 1, all of them in, each with count 0.

    A histogram of counts makes the minimum cheap: it only ever moves up, past empty bins. `least` is m, `most` the
    largest count of the workers still in, `total` the pushes of all workers; once nobody is left they stay as they are.
    """

    def __init__(self, num_workers: int) -> None:
        self.counts = [0] * num_workers
        self.active = [True] * num_workers
        self.least = 0
        self.most = 0
        self.total = 0
        self.num_active = num_workers
        self._bins = Counter({0: num_workers})

    def push(self, worker: int) -> None:
        """Counts one push of `worker`; ProtocolError (and no change) if it has left or never was."""
        self.check(worker)
        count = self.counts[worker]
        self.counts[worker] = count + 1
        self.total += 1
        self.most = max(self.most, count + 1)
        self._bins[count + 1] += 1
        self._remove(count)

    def leave(self, worker: int) -> None:
        """Takes `worker` out of the minimum; ProtocolError (and no change) if it has left or never was."""
        self.check(worker)
        self.active[worker] = False
        self.num_active -= 1
        self._remove(self.counts[worker])

    def state(self) -> dict[str, Any]:
        """Returns counts and members as plain values."""
        bounds = {"least": self.least, "most": self.most, "total": self.total}
        return {"counts": list(self.counts), "active": list(self.active), **bounds}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `state` of as many workers."""
        self.counts = [int(count) for count in state["counts"]]
        self.active = [bool(active) for active in state["active"]]
        self.least, self.most, self.total = int(state["least"]), int(state["most"]), int(state["total"])
        self.num_active = sum(self.active)
        self._bins = Counter(self.counts[worker] for worker in self.workers())

    def gap(self, worker: int) -> int:
        """Returns c_p - m of `worker`."""
        return self.counts[worker] - self.least

    def is_active(self, worker: int) -> bool:
        """Returns whether `worker` is one of ours and has not left."""
        return 0 <= worker < len(self.active) and self.active[worker]

    def workers(self) -> Iterable[int]:
        """Yields the workers still in, ascending."""
        return (worker for worker, active in enumerate(self.active) if active)

    def check(self, worker: int) -> None:
        """Raises ProtocolError if `worker` has left or never was."""
        if not self.is_active(worker):
            raise ProtocolError(f"worker {worker} is not, or no longer, in a group of {len(self.active)}")

    def _remove(self, count: int) -> None:
        self._bins[count] -= 1
        if self._bins[count] > 0:
            return
        del self._bins[count]
        if not self.num_active:
            return
        if count == self.most:
            self.most = max(self._bins)
        if count == self.least:
            while self.least not in self._bins:
                self.least += 1
