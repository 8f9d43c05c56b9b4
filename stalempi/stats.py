"""Counts what a run did, per worker and in all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["RunStats", "WorkerStats"]


@dataclass(slots=True)
class WorkerStats:
    """What one worker did; times in seconds on the server's clock, `waited` on the worker's.

    `bytes_pushed` are of gradients and running statistics as they travel. `hidden` adds up, over its pushes, the share
    of those bytes that had left when backward was over.

    `gap` counts at pushes, `staleness` at applications. A push is applied, dropped, nonfinite (with NaN or infinity) or
    skipped (sent empty by a gradient scaler).
    """

    iterations: int = 0
    samples: int = 0
    waited: float = 0.0
    hidden: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    gap_sum: int = 0
    gap_max: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    applied: int = 0
    dropped: int = 0
    nonfinite: int = 0
    skipped: int = 0
    bytes_pushed: int = 0
    loss: float = math.nan

    def count_gap(self, gap: int) -> None:
        """Counts the gap at a push."""
        self.gap_sum += gap
        self.gap_max = max(self.gap_max, gap)

    def count_staleness(self, staleness: int) -> None:
        """Counts the staleness of a gradient that is being applied."""
        self.applied += 1
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)

    def report(self) -> dict[str, float | int]:
        """Returns the figures of `workers` in result.json."""
        seconds = max(self.ended - self.started, 1e-9)
        return {
            "iterations": self.iterations,
            "samples": self.samples,
            "samples_per_second": self.samples / seconds,
            "wait_share": min(1.0, self.waited / seconds),
            "hidden_share": self.hidden / max(1, self.iterations),
            "gap_mean": self.gap_sum / max(1, self.iterations),
            "gap_max": self.gap_max,
            "staleness_mean": self.staleness_sum / max(1, self.applied),
            "staleness_max": self.staleness_max,
            "dropped": self.dropped,
            "nonfinite": self.nonfinite,
            "skipped": self.skipped,
            "bytes_pushed": self.bytes_pushed,
        }


@dataclass(slots=True)
class RunStats:
    """What a run did in all.

    Attributes:
        workers: one entry per worker.
        updates: optimizer steps made; also the version of the parameters.
        samples: global samples: those of every gradient applied.
        started, ended: server's clock, seconds.
        loss: running mean of the workers' losses, those with NaN or infinity left out; NaN while none was given.
        former: workers of before a resume with another number of them.
    """

    workers: list[WorkerStats]
    updates: int = 0
    samples: int = 0
    started: float = 0.0
    ended: float = 0.0
    loss: float = math.nan
    former: list[WorkerStats] = field(default_factory=list)
    _weight: float = field(default=0.0, repr=False)

    @property
    def seconds(self) -> float:
        """Seconds from the first release to the last leave."""
        return self.ended - self.started

    def count_loss(self, loss: float) -> None:
        """Adds one loss to the running mean, in which a loss weighs 1/e after 20 more."""
        if not math.isfinite(loss):
            return
        self._weight = 0.95 * self._weight + 0.05
        before = 0.0 if math.isnan(self.loss) else self.loss
        self.loss = before + (loss - before) * 0.05 / self._weight

    def report(self) -> dict[str, object]:
        """Returns the figures of result.json that a run itself knows."""
        return {
            "loss": None if math.isnan(self.loss) else self.loss,
            "seconds": self.seconds,
            "samples": self.samples,
            "updates": self.updates,
            "workers": [worker.report() for worker in self.workers],
            "former_workers": [worker.report() for worker in self.former],
        }
