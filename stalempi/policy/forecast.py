"""Forecasts when the least count rises, from the predicted next push of every worker."""

# Letters: m is the least count, c_q the count of worker q, I_q its predicted service time (s).

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from stalempi.policy.clocks import Clocks
from stalempi.policy.predictors import make_predictor

__all__ = ["Forecast"]

Heap = list[tuple[float, int]]


class Forecast:
    """Predicts pushes as release + I_q, and the next rise of m as the latest of them among the workers at count m.

    Args:
        clocks: the policy's, only read.
        predictor: the word of `make_predictor`.
        now: seconds, the start.

    The predicted pushes of the workers of each count lie in two heaps (earliest and latest on top), entered at release
    and cleaned when they come up, so that a question costs O(log P) over the run however many workers there are.
    """

    def __init__(self, clocks: Clocks, *, predictor: str, now: float) -> None:
        num_workers = len(clocks.counts)
        self._clocks = clocks
        self._released = [now] * num_workers
        self._predictors = [make_predictor(predictor) for _ in range(num_workers)]
        self._heaps: dict[int, tuple[Heap, Heap]] = {}
        self._least = 0

    def state(self, now: float) -> dict[str, Any]:
        """Returns the releases, as ages at `now` (s), and what each predictor holds."""
        entered = {(count, worker) for count, (earliest, _) in self._heaps.items() for _, worker in earliest}
        running = [(count, worker) in entered for worker, count in enumerate(self._clocks.counts)]
        ages = [now - released for released in self._released]
        return {
            "ages": ages,
            "running": running,
            "predictors": [dict(vars(predictor)) for predictor in self._predictors],
        }

    def load_state(self, state: dict[str, Any], now: float) -> None:
        """Goes on from a `state` at `now` (s), with the clocks of that moment."""
        for predictor, held in zip(self._predictors, state["predictors"], strict=True):
            vars(predictor).update(held)
        self._released = [now - age for age in state["ages"]]
        self._heaps, self._least = {}, self._clocks.least
        for worker, running in enumerate(state["running"]):
            if running:
                self.released(worker, self._released[worker])

    def interval(self, worker: int) -> float | None:
        """Returns I_q (s); None before the first push."""
        return self._predictors[worker].next

    def released(self, worker: int, now: float) -> None:
        """Enters the next push of `worker`, released at `now`; without a prediction it is due at any moment."""
        self._released[worker] = now
        due = now + (self._predictors[worker].next or 0.0)
        earliest, latest = self._heaps.setdefault(self._clocks.counts[worker], ([], []))
        heappush(earliest, (due, worker))
        heappush(latest, (-due, worker))

    def pushed(self, worker: int, now: float) -> float:
        """Takes a push and returns its service time (s): push minus release, without any time blocked."""
        service = now - self._released[worker]
        self._predictors[worker].see(service)
        return service

    def until_rise(self, now: float) -> float:
        """Returns how many seconds from `now` the least count is predicted to rise.

        A worker that is overdue by d seconds is predicted to need another d: the longer a worker has been silent, the
        less likely it is about to push (papers.md 1.7 says "now", which makes every stall look like no wait at all).
        """
        least = self._clocks.least
        self._forget_below(least)
        earliest, latest = self._heaps[least]
        overdue = now - self._top(earliest, least)
        ahead = -self._top(latest, least) - now
        return max(ahead, overdue, 0.0)

    def _top(self, heap: Heap, count: int) -> float:
        clocks = self._clocks
        while clocks.counts[heap[0][1]] != count or not clocks.active[heap[0][1]]:
            heappop(heap)
        return heap[0][0]

    def _forget_below(self, least: int) -> None:
        while self._least < least:
            self._heaps.pop(self._least, None)
            self._least += 1
