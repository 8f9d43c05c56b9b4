"""Sums a run up in the few figures that policies are compared by."""

from __future__ import annotations

from dataclasses import dataclass

from stalempi.stats import RunStats

__all__ = ["Figures"]


@dataclass(frozen=True)
class Figures:
    """A run in a row of a table.

    Attributes:
        seconds: of the run.
        gradients_per_second: gradients applied, from any worker, per second; the throughput.
        updates_per_second: optimizer steps per second; under BSP a round of gradients is one.
        wait_share: share of the workers' time that they spent waiting for a release.
        gap_mean, gap_max: over all pushes.
        staleness_mean, staleness_max: updates, over all applied gradients.
    """

    seconds: float
    gradients_per_second: float
    updates_per_second: float
    wait_share: float
    gap_mean: float
    gap_max: int
    staleness_mean: float
    staleness_max: int

    @classmethod
    def of(cls, stats: RunStats) -> Figures:
        """Sums up `stats`."""
        workers = stats.workers
        seconds = max(stats.seconds, 1e-12)
        applied = sum(worker.applied for worker in workers)
        pushes = sum(worker.iterations for worker in workers)
        alive = sum(worker.ended - worker.started for worker in workers)
        return cls(
            seconds=stats.seconds,
            gradients_per_second=applied / seconds,
            updates_per_second=stats.updates / seconds,
            wait_share=sum(worker.waited for worker in workers) / max(alive, 1e-12),
            gap_mean=sum(worker.gap_sum for worker in workers) / max(1, pushes),
            gap_max=max(worker.gap_max for worker in workers),
            staleness_mean=sum(worker.staleness_sum for worker in workers) / max(1, applied),
            staleness_max=max(worker.staleness_max for worker in workers),
        )
