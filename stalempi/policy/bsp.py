"""Decides when a round of BSP is complete, with or without backup workers."""

from __future__ import annotations

from typing import Any, ClassVar

from stalempi.errors import ConfigError
from stalempi.policy.base import Apply, Decision, Drop, Leave, Policy, Push
from stalempi.policy.checks import check_whole

__all__ = ["BSP"]


class BSP(Policy):
    """Bulk synchronous parallel: all push, one update with the mean gradient, all are released with it.

    Args:
        backup: c, the number of backup workers. Of N + c workers a round goes on after N gradients; the gradient of a
            worker that was late for its round is dropped when it arrives, and the worker joins the current round. With
            c > 0 every applied gradient is still fresh (staleness 0), but the count of a slow worker may fall behind
            without end, so `bound` is None.

    Each worker that leaves uses up one backup, so that a round stays N gradients large while N workers are in; after
    that a round is complete when all workers still in have pushed. A gradient that waits when its worker is lost is
    applied with its round (law 4).

    Source: papers.md section 2, the unified form with A = I iff |I| = k; section 5 item 4 (backup workers).
    """

    name: ClassVar[str] = "bsp"

    def __init__(self, *, backup: int = 0) -> None:
        self.backup = check_whole("backup", backup)

    @property
    def bound(self) -> int | None:
        """0: nobody starts before all have pushed; None with backup workers."""
        return None if self.backup else 0

    def options(self) -> dict[str, int | float | str]:
        """Returns `backup` where there are backup workers."""
        return {"backup": self.backup} if self.backup else {}

    def _begin(self, num_workers: int, now: float) -> None:
        if num_workers <= self.backup:
            raise ConfigError(f"backup={self.backup} needs at least {self.backup + 1} workers, got {num_workers}")
        self._quorum = num_workers - self.backup
        self._gathered: list[int] = []
        self._num_waiting = 0
        self._on_time = set(range(num_workers))

    def _state(self, now: float) -> dict[str, Any]:
        return {"gathered": list(self._gathered), "waiting": self._num_waiting, "on_time": sorted(self._on_time)}

    def _load_state(self, state: dict[str, Any], now: float) -> None:
        self._gathered = [int(worker) for worker in state["gathered"]]
        self._num_waiting = int(state["waiting"])
        self._on_time = {int(worker) for worker in state["on_time"]}

    def _pushed(self, event: Push) -> list[Decision]:
        worker = event.worker
        if worker not in self._on_time:
            self._on_time.add(worker)
            return [Drop(worker), *self._release((worker,), event.now)]
        self._gathered.append(worker)
        self._num_waiting += 1
        return self._end_round(event.now)

    def _left(self, event: Leave) -> list[Decision]:
        if event.worker in self._gathered:
            self._num_waiting -= 1
        return self._end_round(event.now)

    def _end_round(self, now: float) -> list[Decision]:
        """Ends the round if N gradients are in, or if nobody is left who could still bring one."""
        everybody = self._num_waiting == self.clocks.num_active
        if not self._gathered or not (everybody or len(self._gathered) >= self._quorum):
            return []
        gathered = sorted(self._gathered)
        self._gathered.clear()
        self._num_waiting = 0
        waiting = [worker for worker in gathered if self.clocks.active[worker]]
        self._on_time = set(waiting)
        return [Apply(tuple(gathered)), *self._release(waiting, now)]
