"""Keeps what is still to be sent, in the order of virtual time."""

from __future__ import annotations

import heapq
import math
from enum import IntEnum

from stalempi.simulate.workload import Workload

__all__ = ["Agenda", "Kind"]


class Kind(IntEnum):
    """What happens: the server notices that a worker is lost, a worker leaves, a worker pushes."""

    LOST = 0
    LEAVE = 1
    PUSH = 2


class Agenda:
    """A heap of (time in s, worker, kind), in that order, so that ties do not depend on chance.

    Args:
        workload: whose losses are noted from the start; a worker that has died sends nothing more.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._farewell = workload.farewell or (0.0,) * workload.num_workers
        self._dies = [math.inf] * workload.num_workers
        self._due: list[tuple[float, int, Kind]] = []
        for loss in workload.losses:
            self._dies[loss.worker] = loss.at
            heapq.heappush(self._due, (loss.noticed, loss.worker, Kind.LOST))

    def start_iteration(self, worker: int, now: float) -> None:
        """Notes the push that `worker` will send if it computes from `now` on, or its leave if it has no more data."""
        seconds = self._workload.compute(worker, now)
        if seconds is None:
            self.send(worker, now + self._farewell[worker], Kind.LEAVE)
        else:
            self.send(worker, now + seconds, Kind.PUSH)

    def send(self, worker: int, at: float, kind: Kind) -> None:
        """Notes that `worker` sends something at `at`, if it still lives then."""
        if at <= self._dies[worker]:
            heapq.heappush(self._due, (at, worker, kind))

    def next(self, horizon: float) -> tuple[float, int, Kind] | None:
        """Takes the first entry out; None if there is none up to `horizon`."""
        if not self._due or self._due[0][0] > horizon:
            return None
        return heapq.heappop(self._due)
