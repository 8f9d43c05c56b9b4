"""Decides when a worker may go on under SSP: while its gap is within one fixed bound."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from stalempi.policy.base import Apply, Decision, Leave, Policy, Push
from stalempi.policy.checks import check_whole
from stalempi.policy.gate import Gate

__all__ = ["SSP", "Gated"]


class Gated(Policy):
    """A policy that updates on every push and holds a worker while its gap is above a threshold.

    A subclass names the threshold of each push (`_threshold`); the worker is held until its gap is within it.
    """

    def _begin(self, num_workers: int, now: float) -> None:
        self._gate = Gate()

    def _state(self, now: float) -> dict[str, Any]:
        return {"gate": self._gate.state()}

    def _load_state(self, state: dict[str, Any], now: float) -> None:
        self._gate.load_state(state["gate"])

    def let_run_ahead(self) -> None:
        """Takes the iteration that is begun early out of every threshold, each of which must be at least 1."""
        if self._least_threshold() < 1:
            super().let_run_ahead()
        self.run_ahead = 1

    def _least_threshold(self) -> int:
        """Returns the smallest threshold that a push can have."""
        return 0

    @abstractmethod
    def _threshold(self, event: Push) -> int:
        """Returns the largest gap at which the worker that has just pushed may go on."""

    def _pushed(self, event: Push) -> list[Decision]:
        worker = event.worker
        opened = self._gate.open(self.clocks.least)
        need = self.clocks.counts[worker] + self.run_ahead - self._threshold(event)
        if need <= self.clocks.least:
            opened.insert(0, worker)
        else:
            self._gate.hold(worker, need)
        return [Apply((worker,)), *self._release(opened, event.now)]

    def _left(self, event: Leave) -> list[Decision]:
        self._gate.discard(event.worker)
        return self._release(self._gate.open(self.clocks.least), event.now)


class SSP(Gated):
    """Stale synchronous parallel: a worker with count c may start iff c - m <= s.

    Args:
        bound: s >= 0. SSP(0) has the barrier of BSP, but one update per push.

    Source: Ho et al. 2013, in the form of papers.md section 2 (update and fresh parameters on every push). Some texts
    block at a gap of s; here, as in DSSP's Algorithm 1 line 8, a worker may start at s and waits at s + 1.
    """

    name: ClassVar[str] = "ssp"

    def __init__(self, bound: int) -> None:
        self._bound = check_whole("bound", bound)

    @property
    def bound(self) -> int:
        """s, the largest gap at which a worker may start."""
        return self._bound

    def options(self) -> dict[str, int | float | str]:
        """Returns `bound`."""
        return {"bound": self._bound}

    def _least_threshold(self) -> int:
        return self._bound

    def _threshold(self, event: Push) -> int:
        return self._bound
