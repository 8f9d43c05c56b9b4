"""Predicts a worker's next service time (push minus release, seconds) from those seen."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from stalempi.errors import ConfigError
from stalempi.policy.checks import check_number

__all__ = ["PREDICTORS", "Ema", "Last", "MeanStd", "Predictor", "make_predictor"]


class Predictor(ABC):
    """Predicts the `next` service time (s) of one worker; None, no prediction, before the first is seen."""

    next: float | None = None

    @abstractmethod
    def see(self, service: float) -> None:
        """Takes one service time (s)."""


class Last(Predictor):
    """The last service time, as the paper's Algorithm 2 assumes (lines 4-5)."""

    def see(self, service: float) -> None:
        """Takes one service time (s)."""
        self.next = service


class Ema(Predictor):
    """The exponential moving average I <- b * I + (1 - b) * x (papers.md 1.7).

    Args:
        b: the share of the old average that is kept, in [0, 1).
    """

    def __init__(self, b: float = 0.7) -> None:
        self.b = check_number("b of predictor ema", b, below=1.0)

    def see(self, service: float) -> None:
        """Takes one service time (s)."""
        self.next = service if self.next is None else self.b * self.next + (1.0 - self.b) * service


class MeanStd(Predictor):
    """The mean plus z standard deviations of all service times seen (papers.md 1.7), by Welford's recurrence.

    Args:
        z: deviations added; 0 is the plain mean.
    """

    def __init__(self, z: float = 1.0) -> None:
        self.z = check_number("z of predictor mean-std", z)
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def see(self, service: float) -> None:
        """Takes one service time (s)."""
        self._count += 1
        before = service - self._mean
        self._mean += before / self._count
        self._squares += before * (service - self._mean)
        self.next = self._mean + self.z * math.sqrt(self._squares / self._count)


PREDICTORS: dict[str, type[Predictor]] = {"last": Last, "ema": Ema, "mean-std": MeanStd}


def make_predictor(word: str) -> Predictor:
    """Returns a new predictor from its word: "last", "ema", "ema:0.9", "mean-std" or "mean-std:2".

    Raises ConfigError for another word or a parameter out of range.
    """
    name, colon, value = word.partition(":")
    kind = PREDICTORS.get(name)
    if kind is None:
        raise ConfigError(f"predictor must be one of {', '.join(PREDICTORS)}, got {word!r}")
    if not colon:
        return kind()
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"predictor {name} needs a number after the colon, got {word!r}") from None
    if kind is Ema:
        return Ema(number)
    if kind is MeanStd:
        return MeanStd(number)
    raise ConfigError(f"predictor {name} has no parameter, got {word!r}")
