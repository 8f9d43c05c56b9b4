"""Keeps what is still to be sent, in the order of virtual time."""

from __future__ import annotations

import heapq
import math
from enum import IntEnum
from typing import NamedTuple

from stalempi.simulate.network import Wire
from stalempi.simulate.workload import Workload

__all__ = ["Agenda", "Due", "Kind"]


class Kind(IntEnum):
    """What happens: the server notices that a worker is lost, a worker leaves, a worker pushes."""

    LOST = 0
    LEAVE = 1
    PUSH = 2


class Due(NamedTuple):
    """Something that is at the server's link at `reached` (s) and was sent at `sent` (s)."""

    reached: float
    worker: int
    kind: Kind
    sent: float


class Agenda:
    """A heap of what is due, by time, worker and kind, so that ties do not depend on chance.

    Args:
        workload: whose losses are noted from the start; a worker that has died sends nothing more.
        wire: says when what is sent reaches the server's link.
    """

    def __init__(self, workload: Workload, wire: Wire) -> None:
        self._workload, self._wire = workload, wire
        self._farewell = workload.farewell or (0.0,) * workload.num_workers
        self._dies = [math.inf] * workload.num_workers
        self._due: list[Due] = []
        for loss in workload.losses:
            self._dies[loss.worker] = loss.at
            heapq.heappush(self._due, Due(loss.noticed, loss.worker, Kind.LOST, loss.noticed))

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
            reached = self._wire.reach(worker, at, empty=kind is not Kind.PUSH)
            heapq.heappush(self._due, Due(reached, worker, kind, at))

    def next(self, horizon: float) -> Due | None:
        """Takes the first entry out; None if there is none up to `horizon`."""
        if not self._due or self._due[0].reached > horizon:
            return None
        return heapq.heappop(self._due)
