"""Notices workers that should be computing and say nothing."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence

from stalempi.errors import ConfigError, StallError
from stalempi.policy.base import Policy

__all__ = ["CHECK_EVERY", "Silence", "default_stall_timeout"]

logger = logging.getLogger("stalempi.server")

# Seconds between two looks; however busy the other workers keep the server, a silent one is noticed.
CHECK_EVERY = 0.5


class Silence:
    """How long each worker has said nothing, on the server's clock.

    Args:
        ranks: the rank of each worker.
        now: time of the first release (s).
        warning, timeout: seconds of silence of a computing worker before a warning and before StallError.
    """

    def __init__(self, ranks: Sequence[int], now: float, *, warning: float, timeout: float) -> None:
        self._ranks, self._warning, self._timeout = ranks, warning, timeout
        self._heard = [now] * len(ranks)
        self._warned = [False] * len(ranks)
        self._next_look = -math.inf

    def broken(self, worker: int, now: float) -> None:
        """Takes note that `worker` has pushed, or been released, at `now` (s)."""
        self._heard[worker], self._warned[worker] = now, False

    def check(self, policy: Policy, now: float) -> None:
        """Warns of workers that run and are silent, once for each silence; StallError after the timeout."""
        if now < self._next_look:
            return
        self._next_look = now + CHECK_EVERY
        for worker, heard in enumerate(self._heard):
            silent = now - heard
            if silent < self._warning or not policy.is_running(worker):
                continue
            step = policy.clocks.counts[worker]
            where = f"worker {worker} (rank {self._ranks[worker]}) has been silent for {silent:.0f} s since step {step}"
            if silent >= self._timeout:
                raise StallError(f"{where}: it is stuck or gone; raise stall_timeout if its steps take that long")
            if not self._warned[worker]:
                self._warned[worker] = True
                waiting = [str(w) for w in policy.clocks.workers() if not policy.is_running(w)]
                logger.warning("%s; waiting for it: workers %s", where, ", ".join(waiting) or "none")


def default_stall_timeout() -> float:
    """Returns the seconds of silence that end a job where nothing else is said: STALEMPI_STALL_TIMEOUT, or 600."""
    text = os.environ.get("STALEMPI_STALL_TIMEOUT", "600")
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"STALEMPI_STALL_TIMEOUT must be a number of seconds, got {text!r}") from None
