"""Chooses queue lengths for DSP: the shortest that leave its period at what the slowest block needs.

Longer queues hide links and stragglers, and cost staleness and memory (m_k of Eq. 6), so none is longer than it pays.
"""

from __future__ import annotations

from collections.abc import Sequence

from stalempi.errors import ConfigError
from stalempi.pipeline.dryrun import BlockCost, LinkCost, Slow, play
from stalempi.pipeline.schedules import DSP

__all__ = ["size_queues", "uniform_queues"]


def uniform_queues(blocks: int, p: int, q: int, *, overlaps: bool = True) -> DSP:
    """Returns the DSP with `p` outputs and `q` error gradients on the way between any two neighbours."""
    up = (*[p] * (blocks - 1), 0)
    return DSP(up, tuple((p + q) * (blocks - 1 - k) for k in range(blocks)), overlaps)


def size_queues(
    costs: Sequence[BlockCost],
    *,
    link: LinkCost | None = None,
    slow: Slow | None = None,
    overlaps: bool = True,
    within: float = 0.03,
    longest: int = 16,
) -> DSP:
    """Returns the DSP with the least staleness, p and q the same on each link, that runs as fast as its blocks can.

    That is: whose period, played with these costs, is within a share of what the busiest block needs for a step (F + B,
    and R where it is not beside F). Only p + q of a link tells on the period; p takes the smaller half.

    Args:
        costs: of each block, as measured.
        link: of every link; free by default.
        slow: factor of what a block does in a step, as `slow(block, step)`; see `play`. The busiest block is then the
            one that needs most on average.
        overlaps: whether a recompute runs beside the forward of newer data.
        within: how much longer than the busiest block's step the period may be, as a share of it.
        longest: p + q of a link, at most.

    Raises ConfigError if even the longest queues are not enough.
    """
    if not costs:
        raise ConfigError("no costs: give one a block")
    if within < 0 or longest < 1:
        raise ConfigError(f"within must be at least 0 and longest at least 1, got {within:g} and {longest}")
    blocks, period, best = len(costs), 0.0, 0.0
    for total in range(min(1, blocks - 1), longest + 1):
        schedule = uniform_queues(blocks, total // 2, total - total // 2, overlaps=overlaps)
        batches = 4 * schedule.m[0] + (200 if slow is None else 600)
        steady = range(batches // 2, batches)
        best = max(_step(costs[k], schedule, k) * (_mean(slow, k, steady) if slow else 1) for k in range(blocks))
        period = play(schedule, blocks, batches, costs=costs, link=link, slow=slow).period
        if period <= best * (1 + within) + 1e-12:
            return schedule
    raise ConfigError(
        f"queues of {longest} batches a link leave {period:.3g} s a batch where the busiest block needs {best:.3g} s: "
        f"allow longer ones, or more than {within:.0%}"
    )


def _step(cost: BlockCost, schedule: DSP, block: int) -> float:
    recompute = 0.0 if schedule.keeps_graph(block, len(schedule.m)) else cost.recompute
    forward = max(cost.forward, recompute) if schedule.overlaps else cost.forward + recompute
    return forward + cost.backward + cost.update


def _mean(slow: Slow, block: int, steps: Sequence[int]) -> float:
    return sum(slow(block, step) for step in steps) / len(steps)
