"""Waits for something without burning a core that a worker needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Backoff", "wait_for"]


def _never() -> bool:
    return False


@dataclass(slots=True)
class Backoff:
    """Spins briefly, then sleeps in growing steps; `reset` when something has happened.

    Attributes:
        spin: seconds to spin, yielding the core, before the first sleep.
        shortest, longest: seconds of the first sleep and of the longest one.
        growth: each sleep is that many times the one before, so one overshoots by at most growth - 1 of the wait.
        patience: seconds to spin while a message is half here: MPI moves a large one only when called, a piece a time.
        eager: seconds that no sleep exceeds while one still is, after that.
    """

    spin: float = 1e-3
    shortest: float = 20e-6
    longest: float = 1e-3
    growth: float = 1.2
    patience: float = 5e-3
    eager: float = 50e-6
    _half_since: float | None = field(default=None, init=False)
    _since: float | None = field(default=None, init=False)
    _sleep: float = field(default=0.0, init=False)

    def reset(self) -> None:
        """Begins anew: the next pauses spin."""
        self._since = self._half_since = None
        self._sleep = self.shortest

    def pause(self, half_here: Callable[[], bool] = _never) -> None:
        """Lets other processes run for a moment; `half_here` says, if that matters, whether a message is."""
        now = time.perf_counter()
        if self._since is None:
            self._since, self._sleep = now, self.shortest
        if now - self._since < self.spin:
            os.sched_yield()
            return
        arriving = half_here()
        if arriving and self._half_since is None:
            self._half_since = now
        if arriving and now - (self._half_since or now) < self.patience:
            os.sched_yield()
            return
        time.sleep(min(self._sleep, self.eager) if arriving else self._sleep)
        self._sleep = min(self.growth * self._sleep, self.longest)


def wait_for(happened: Callable[[], bool], timeout: float, half_here: Callable[[], bool] = _never) -> bool:
    """Polls `happened` until it is true or `timeout` seconds have passed; returns whether it is."""
    if happened():
        return True
    backoff, until = Backoff(), time.monotonic() + timeout
    while not happened():
        if time.monotonic() >= until:
            return False
        backoff.pause(half_here)
    return True
