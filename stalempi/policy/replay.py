"""Replays the group's service times under every threshold, and so measures the wait that a larger one would avoid."""

# Letters: s a threshold, m the least count. Row k is the k-th iteration of every worker; S(p, k) its recorded service
# time (s) at worker p, T(p, k) the virtual time (s) of its push, M(k) = max over p of T(p, k): when m reaches k.

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

__all__ = ["Replay"]


class _Run:
    """One virtual run of SSP(s): T(p, k) = max(T(p, k-1), M(k-1-s)) + S(p, k)."""

    def __init__(self, threshold: int, num_workers: int) -> None:
        self.threshold = threshold
        self.loss = 0.0
        self.pushes = [0.0] * num_workers
        self._rows = deque([0.0], maxlen=threshold + 1)

    def state(self) -> dict[str, Any]:
        """Returns the last pushes and rows and the loss so far."""
        return {"loss": self.loss, "pushes": list(self.pushes), "rows": list(self._rows)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `state` of the same threshold."""
        self.loss, self.pushes = float(state["loss"]), list(state["pushes"])
        self._rows = deque(state["rows"], maxlen=self.threshold + 1)

    def row(self, services: list[float]) -> float:
        """Runs row k (services in s) and returns M(k) - M(k-1)."""
        before, gate = self._rows[-1], self._rows[0]
        pairs = zip(self.pushes, services, strict=True)
        self.pushes = [(last if last > gate else gate) + service for last, service in pairs]
        self._rows.append(max(self.pushes))
        return self._rows[-1] - before


class Replay:
    """Measures, for each of `thresholds`, the share of time that SSP(s) loses against the largest of them.

    Waiting alone is no loss: next to a worker that is slow for good, everybody waits under any threshold and nothing is
    gained by a larger one. The loss is what M(k), the progress of the whole group, gives away; it is avoidable, and
    it is what a threshold is for. Replayed with recorded service times it depends on no prediction, and not on the
    thresholds that were really used.

    Args:
        num_workers: all of them in.
        thresholds: ascending.
        memory: rows after which an observation weighs 1/e.

    A row costs O(P * len(thresholds)), hence a push O(len(thresholds)) over the run.
    """

    def __init__(self, num_workers: int, thresholds: Sequence[int], *, memory: int) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._members = list(range(num_workers))
        self._services: list[deque[float]] = [deque() for _ in range(num_workers)]
        self._runs = [_Run(threshold, num_workers) for threshold in thresholds]
        self._elapsed = 0.0
        self._row = 0

    def record(self, worker: int, service: float) -> None:
        """Takes the service time (s) of the latest push of `worker`."""
        self._services[worker].append(service)

    def leave(self, worker: int) -> None:
        """Takes `worker` out of all rows to come."""
        place = self._members.index(worker)
        del self._members[place]
        for run in self._runs:
            del run.pushes[place]

    def state(self) -> dict[str, Any]:
        """Returns everything that was recorded and replayed, as plain values."""
        return {
            "members": list(self._members),
            "services": [list(services) for services in self._services],
            "runs": [run.state() for run in self._runs],
            "elapsed": self._elapsed,
            "row": self._row,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `state` of as many workers and the same thresholds."""
        self._members = [int(worker) for worker in state["members"]]
        self._services = [deque(services) for services in state["services"]]
        for run, held in zip(self._runs, state["runs"], strict=True):
            run.load_state(held)
        self._elapsed, self._row = float(state["elapsed"]), int(state["row"])

    def advance(self, least: int) -> bool:
        """Replays the rows that are complete now that m is `least`; returns whether there were any."""
        complete = bool(self._members) and self._row < least
        while self._members and self._row < least:
            self._row += 1
            self._replay([self._services[worker].popleft() for worker in self._members])
        return complete

    def smallest(self, share: float) -> int:
        """Returns the smallest threshold whose recent loss is at most `share` of the time."""
        limit = share * self._elapsed
        return next((run.threshold for run in self._runs if run.loss <= limit), self._runs[-1].threshold)

    def _replay(self, services: list[float]) -> None:
        steps = [run.row(services) for run in self._runs]
        best = steps[-1]
        self._elapsed = self._keep * self._elapsed + best
        for run, step in zip(self._runs, steps, strict=True):
            run.loss = self._keep * run.loss + step - best
