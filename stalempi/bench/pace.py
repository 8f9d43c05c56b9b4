"""Makes the blocks of a pipeline slower than they are, so that schedules can be studied on few cores."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stalempi.errors import ConfigError
from stalempi.pipeline.actions import Op
from stalempi.pipeline.dryrun import BlockCost

__all__ = ["BlockPace", "parse_emulated", "parse_slow_blocks"]


@dataclass(frozen=True)
class BlockPace:
    """How long the computations of blocks take; what they really take is the least.

    Attributes:
        times: seconds of forward, recompute and backward of a whole batch instead of their own; None: their own.
        slow: factor of each block.
        prob: probability that one block, drawn anew for each step, is slower by `factor`.
        factor: how many times longer its computations take then.
        seed: of the draws, the same on every rank.
    """

    times: tuple[float, float, float] | None
    slow: tuple[float, ...]
    prob: float = 0.0
    factor: float = 1.0
    seed: int = 0

    def __bool__(self) -> bool:
        """Whether anything is slower than it is."""
        return self.times is not None or max(self.slow) > 1 or (self.prob > 0 and self.factor > 1)

    def of(self, block: int, step: int) -> float:
        """Returns the factor of a block in a step."""
        draw = random.Random((self.seed << 32) + step)
        hit = draw.random() < self.prob and draw.randrange(len(self.slow)) == block
        return self.slow[block] * (self.factor if hit else 1.0)

    def costs(self) -> list[BlockCost]:
        """Returns what the dry run takes for the blocks: F = R = 1, B = 2 where no times are given."""
        forward, recompute, backward = self.times or (1.0, 1.0, 2.0)
        return [BlockCost(forward, recompute, backward) for _ in self.slow]

    def words(self) -> list[str]:
        """Says what is slower than it is, as the command's options."""
        words = [] if self.times is None else ["--emulate-ms " + ",".join(f"{1e3 * t:g}" for t in self.times)]
        words += [f"--slow {block}={factor:g}" for block, factor in enumerate(self.slow) if factor > 1]
        if self.prob > 0 and self.factor > 1:
            words.append(f"--straggler-prob {self.prob:g} --straggler-factor {self.factor:g}")
        return words

    def stretch(self, block: int, op: Op, step: int, began: float, parts: int) -> None:
        """Sleeps until a computation of `block` that began at `began` has taken as long as it is to take.

        `parts` is the number of micro-batches of a batch, each of which takes its share.
        """
        took = time.perf_counter() - began
        time.sleep(max(0.0, self._own(op, took, parts) * self.of(block, step) - took))

    def _own(self, op: Op, took: float, parts: int) -> float:
        places = {Op.FORWARD: 0, Op.RECOMPUTE: 1, Op.BACKWARD: 2}
        if self.times is None:
            return took if op in places else 0.0
        return self.times[places[op]] / parts if op in places else 0.0


def parse_emulated(text: str | None) -> tuple[float, float, float] | None:
    """Reads F,R,B in milliseconds and returns seconds; ConfigError otherwise."""
    if text is None:
        return None
    try:
        forward, recompute, backward = (float(word) / 1e3 for word in text.split(","))
    except ValueError:
        raise ConfigError(f"--emulate-ms takes F,R,B in milliseconds, as in 20,20,40, got {text!r}") from None
    if not all(0 <= value < math.inf for value in (forward, recompute, backward)):
        raise ConfigError(f"--emulate-ms {text}: give finite times of at least 0")
    return forward, recompute, backward


def parse_slow_blocks(specs: Sequence[str], blocks: int) -> tuple[float, ...]:
    """Reads BLOCK=FACTOR words, block 0 .. blocks - 1, factor at least 1; ConfigError otherwise."""
    found = [1.0] * blocks
    for spec in specs:
        try:
            block, factor = int(spec.partition("=")[0]), float(spec.partition("=")[2])
        except ValueError:
            raise ConfigError(f"--slow takes BLOCK=FACTOR, as in --slow 2=1.9, got {spec!r}") from None
        if not 0 <= block < blocks:
            raise ConfigError(f"--slow {spec}: blocks are 0 to {blocks - 1}")
        if not 1 <= factor < math.inf:
            raise ConfigError(f"--slow {spec}: give a factor of at least 1, and a finite one")
        found[block] = factor
    return tuple(found)
