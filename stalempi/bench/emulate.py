"""Makes a worker slower than it is, so that scheduling can be studied on a machine with few cores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from stalempi.errors import ConfigError

__all__ = ["Pace", "parse_slow"]


def parse_slow(specs: Sequence[str], ranks: int, *, first: int = 1) -> dict[int, float]:
    """Reads RANK=FACTOR words: rank `first` .. ranks - 1 of the job, factor at least 1; ConfigError otherwise."""
    found: dict[int, float] = {}
    for spec in specs:
        try:
            rank, factor = int(spec.partition("=")[0]), float(spec.partition("=")[2])
        except ValueError:
            raise ConfigError(f"--slow takes RANK=FACTOR, as in --slow 2=1.9, got {spec!r}") from None
        if not first <= rank < ranks:
            raise ConfigError(f"--slow {spec}: workers are ranks {first} to {ranks - 1}")
        if not 1 <= factor < math.inf:
            raise ConfigError(f"--slow {spec}: give a factor of at least 1, and a finite one")
        if rank in found:
            raise ConfigError(f"--slow {spec}: rank {rank} has a factor already")
        found[rank] = factor
    return found


class Pace:
    """Stretches a worker's iterations; the time that one really takes is the least that it can be given.

    Args:
        factor: how many times longer an iteration takes.
        emulate_ms: milliseconds that a sample takes instead.
        scenario: seconds that the iteration takes instead which begins so many seconds after the first.
    """

    def __init__(
        self,
        factor: float = 1.0,
        emulate_ms: float | None = None,
        *,
        scenario: Callable[[float], float] | None = None,
    ) -> None:
        self._factor, self._emulate_ms, self._scenario = factor, emulate_ms, scenario
        self._first: float | None = None
        self._began = 0.0

    def begin(self) -> None:
        """Marks the start of an iteration's computation."""
        self._began = time.perf_counter()
        if self._first is None:
            self._first = self._began

    def end(self, samples: int) -> None:
        """Sleeps until the iteration has taken as long as it is to take."""
        took = time.perf_counter() - self._began
        remains = self._own(samples, took) * self._factor - took
        if remains > 0:
            time.sleep(remains)

    def _own(self, samples: int, took: float) -> float:
        if self._scenario is not None:
            assert self._first is not None, "begin comes first"
            return self._scenario(self._began - self._first)
        return took if self._emulate_ms is None else samples * self._emulate_ms / 1e3
