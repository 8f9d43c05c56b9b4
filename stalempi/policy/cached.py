"""Decides when a worker may go on with its own copy, and when it needs fresh parameters: SSP with cached pulls."""

# Letters: s the bound, c the clock (count of pushes) of the reading worker, m the least count, f the m at its last
# release.

from __future__ import annotations

from typing import Any, ClassVar

from stalempi.policy.base import Apply, Continue, Decision, Leave, Policy, Push
from stalempi.policy.checks import check_whole
from stalempi.policy.gate import Gate

__all__ = ["CachedSSP"]


class CachedSSP(Policy):
    """SSP as Ho et al. (2013) have it: a worker reuses its copy while that is fresh enough, and pulls only then.

    Args:
        bound: s >= 0; with s = 0 every push is followed by a release, as under SSP(0).

    The updates of each worker are numbered 0, 1, 2, ... Where a worker starts its iteration c,

    1. its gap is at most s;
    2. its copy has every update numbered c - s - 1 or less of every worker still in;
    3. its copy has all its own updates, 0 to c - 1 (read-my-writes);
    4. of the others' later updates it may have some.

    A release that happened when the least count was f brought every update numbered below f, so (2) holds while
    c - f <= s: then the decision is `Continue`, and the worker adds its own update to its copy for (3). Otherwise it
    is `Release`, at once if c - m <= s or when m has risen that far. As f <= m, `Continue` implies (1).

    Source: papers.md section 2, "SSP read guarantee" (i) to (iv); Bosen's rule "row_clock >= clock - staleness".
    """

    name: ClassVar[str] = "ssp-cached"

    def __init__(self, bound: int) -> None:
        self._bound = check_whole("bound", bound)

    @property
    def bound(self) -> int:
        """s, the largest gap at which a worker may start."""
        return self._bound

    def options(self) -> dict[str, int | float | str]:
        """Returns `bound`."""
        return {"bound": self._bound}

    def _begin(self, num_workers: int, now: float) -> None:
        self._gate = Gate()
        self._fetched = [0] * num_workers

    def _state(self, now: float) -> dict[str, Any]:
        return {"gate": self._gate.state(), "fetched": list(self._fetched)}

    def _load_state(self, state: dict[str, Any], now: float) -> None:
        self._gate.load_state(state["gate"])
        self._fetched = [int(least) for least in state["fetched"]]

    def _pushed(self, event: Push) -> list[Decision]:
        worker, least = event.worker, self.clocks.least
        decisions: list[Decision] = [Apply((worker,))]
        opened = self._gate.open(least)
        need = self.clocks.counts[worker] - self._bound
        if need <= self._fetched[worker]:
            self._running[worker] = True
            decisions.append(Continue(worker))
        elif need <= least:
            opened.insert(0, worker)
        else:
            self._gate.hold(worker, need)
        return decisions + self._release(opened, event.now)

    def _left(self, event: Leave) -> list[Decision]:
        self._gate.discard(event.worker)
        return self._release(self._gate.open(self.clocks.least), event.now)

    def _on_release(self, worker: int, now: float) -> None:
        self._fetched[worker] = self.clocks.least
