"""Cuts a row of units into blocks so that the slowest block is as fast as can be.

A pipeline's period is that of its slowest block (docs/splitting.md), so the best cut makes the largest cost least.
Blocks are contiguous; n units leave (n - 1 choose K - 1) ways to make K blocks, searched exactly in O(K n^2) steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stalempi.errors import ConfigError

__all__ = ["Memory", "check_boundaries", "partition"]

Price = Callable[[int, int, int], float]  # of block k holding the units i to j - 1


@dataclass(frozen=True)
class Memory:
    """What blocks need and have, in bytes.

    Args:
        units: of each unit: parameters, gradients, optimizer state, what its graph saves.
        inputs: of each unit: the tensors that enter it, which its block stores if it begins there.
        held: of each block: how many inputs it holds at once.
        limits: of each block: what it may use in all.
    """

    units: Sequence[float]
    inputs: Sequence[float]
    held: Sequence[int]
    limits: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.units) != len(self.inputs) or len(self.held) != len(self.limits):
            raise ConfigError(
                f"{len(self.units)} units with {len(self.inputs)} inputs, {len(self.held)} blocks with "
                f"{len(self.limits)} limits: give one number for each"
            )
        for name in ("units", "inputs", "held", "limits"):
            _check_numbers(f"memory {name}", getattr(self, name))

    def need(self, block: int, begin: int, end: int) -> float:
        """Returns the bytes that `block` needs to hold the units from `begin` up to `end`, exclusive."""
        return sum(self.units[begin:end]) + self.held[block] * self.inputs[begin]


def check_boundaries(boundaries: Sequence[int], units: int) -> tuple[int, ...]:
    """Returns `boundaries`, at which new blocks begin, if they cut so many units into blocks of at least one.

    Raises ConfigError if they do not.
    """
    cuts = tuple(boundaries)
    if any(isinstance(cut, bool) or not isinstance(cut, int) for cut in cuts):
        raise ConfigError(f"boundaries {cuts}: give the indices of the units at which a new block begins")
    if list(cuts) != sorted(set(cuts)):
        raise ConfigError(f"boundaries {cuts}: give them in increasing order, each once")
    if cuts and not 1 <= cuts[0] <= cuts[-1] < units:
        raise ConfigError(f"boundaries {cuts}: a model of {units} unit(s) can be cut before units 1 to {units - 1}")
    return cuts


def partition(
    costs: Sequence[float], blocks: int, *, transfer: Sequence[float] = (), memory: Memory | None = None
) -> tuple[int, ...]:
    """Finds the contiguous blocks whose largest cost is least.

    Of equally good ones it takes the most even, that is with the least sum of squared costs, and of these the one whose
    boundaries come earliest, so every rank finds the same.

    Args:
        costs: seconds per batch of each unit: forward and backward, and recompute where it is not hidden.
        blocks: how many to make, K.
        transfer: seconds to hand over each unit's input, which count in both blocks if one begins there; none: free.
        memory: what blocks need and have, if that is bounded.

    Returns:
        The K - 1 boundaries: the index of the first unit of each block but the first.

    Raises:
        ConfigError: there are fewer units than blocks, or no cut fits into memory.
    """
    n = len(costs)
    if blocks < 1 or blocks > n:
        raise ConfigError(f"{n} unit(s) cannot make {blocks} block(s): give 1 to {n}")
    _check_numbers("costs", costs)
    _check_numbers("transfer", transfer)
    if len(transfer) not in (0, n):
        raise ConfigError(f"{len(transfer)} transfer costs for {n} units: give one for each unit's input, or none")
    if memory and (len(memory.units), len(memory.limits)) != (n, blocks):
        raise ConfigError(f"memory of {len(memory.units)} units and {len(memory.limits)} blocks, not {n} and {blocks}")
    price = _priced(costs, transfer or [0.0] * n, memory)
    least, _ = _search(n, blocks, price, max)
    if memory and math.isinf(least):
        raise ConfigError(_no_room(memory))

    def squared(k: int, i: int, j: int) -> float:
        cost = price(k, i, j)
        return cost * cost if cost <= least else math.inf

    return _search(n, blocks, squared, lambda block, rest: block + rest)[1]


def _priced(costs: Sequence[float], transfer: Sequence[float], memory: Memory | None) -> Price:
    n = len(costs)
    sums = [[0.0] * (n + 1) for _ in range(n)]
    for i in range(n):
        for j in range(i + 1, n + 1):
            sums[i][j] = sums[i][j - 1] + costs[j - 1]

    def price(k: int, i: int, j: int) -> float:
        if memory and memory.need(k, i, j) > memory.limits[k]:
            return math.inf
        return sums[i][j] + (transfer[i] if i > 0 else 0.0) + (transfer[j] if j < n else 0.0)

    return price


def _search(n: int, blocks: int, price: Price, join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """Makes the `join` of all blocks' prices least; of equals, takes the earliest boundaries.

    rest[k][i] is the least for the units from i on in the blocks from k on; end[k][i] is where block k then ends.
    """
    rest = [[math.inf] * (n + 1) for _ in range(blocks + 1)]
    end = [[n] * (n + 1) for _ in range(blocks)]
    rest[blocks][n] = 0.0
    for k in reversed(range(blocks)):
        latest = n - (blocks - k - 1)  # leaves one unit for each block after k
        for i in range(k, latest):
            for j in range(i + 1, latest + 1):
                if math.isinf(rest[k + 1][j]):
                    continue
                total = join(price(k, i, j), rest[k + 1][j])
                if total < rest[k][i]:
                    rest[k][i], end[k][i] = total, j
    boundaries, at = [], 0
    for k in range(blocks - 1):
        at = end[k][at]
        boundaries.append(at)
    return rest[0][0], tuple(boundaries)


def _check_numbers(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name}: {value} is not a finite number of at least 0")


def _no_room(memory: Memory) -> str:
    limits = ", ".join(f"{limit:.4g}" for limit in memory.limits)
    return (
        f"no cut fits into memory: the units need {sum(memory.units):.4g} bytes beside stored inputs, the largest "
        f"{max(memory.units):.4g}, and the blocks may use {limits}: raise the limits, take more blocks, smaller "
        "batches or shorter queues"
    )
