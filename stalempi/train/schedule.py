"""Says by what factor the learning rate is multiplied after so many global samples.

A schedule is a pure function of the samples that all workers together have pushed (law 11), so that it is the same for
every policy and any number of workers. Schedules multiply: `Warmup(5_000) * Cosine(100_000)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from stalempi.errors import ConfigError

__all__ = ["Constant", "Cosine", "Product", "Schedule", "StepDecay", "Warmup", "linear_scaling"]


class Schedule(ABC):
    """A factor of the learning rate as a function of global samples."""

    @abstractmethod
    def __call__(self, samples: int) -> float:
        """Returns the factor after `samples` global samples, from 0 on."""

    def __mul__(self, other: Schedule) -> Product:
        """Makes the schedule whose factor is the product of both."""
        return Product((self, other))


@dataclass(frozen=True)
class Constant(Schedule):
    """Leaves the learning rate as it is."""

    def __call__(self, samples: int) -> float:
        """Returns 1."""
        return 1.0


@dataclass(frozen=True)
class StepDecay(Schedule):
    """Multiplies by `factor` at each share of `total` samples.

    `at=(2/3, 5/6)` are the epochs 200 and 250 of 300 of the DSSP paper's ResNets (arXiv 1908.11848).
    """

    total: int
    at: tuple[float, ...] = (2 / 3, 5 / 6)
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_total(self.total)
        if not all(0 < share <= 1 for share in self.at):
            raise ConfigError(f"decay at {self.at}: give shares of the whole run above 0 and up to 1, such as 0.5 0.75")
        if self.factor <= 0:
            raise ConfigError(f"decay factor {self.factor}: give a number above 0, such as 0.1")

    def __call__(self, samples: int) -> float:
        """Returns factor ** (number of shares reached)."""
        return float(self.factor ** sum(samples >= share * self.total for share in self.at))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Falls from 1 at `start` samples to `floor` at `total` along half a cosine (Loshchilov and Hutter 2017, eq. 5)."""

    total: int
    start: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_total(self.total)
        if not 0 <= self.start < self.total:
            raise ConfigError(f"the cosine starts at {self.start} of {self.total} samples: start it before the end")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"floor={self.floor}: give a factor from 0 to 1")

    def __call__(self, samples: int) -> float:
        """Returns 1 before `start` and `floor` after `total`."""
        share = min(max((samples - self.start) / (self.total - self.start), 0.0), 1.0)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Warmup(Schedule):
    """Rises linearly from `initial` to 1 over the first `length` samples (Goyal et al. 2017, section 2.2).

    With the linear scaling rule for k times the batch, their `initial` is 1/k.
    """

    length: int
    initial: float = 0.1

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"warm-up over {self.length} samples: give at least 1, or leave the warm-up out")
        if not 0 <= self.initial <= 1:
            raise ConfigError(f"warm-up from {self.initial}: give a factor from 0 to 1")

    def __call__(self, samples: int) -> float:
        """Returns the factor, 1 from `length` samples on."""
        return self.initial + (1 - self.initial) * min(samples / self.length, 1.0)


@dataclass(frozen=True)
class Product(Schedule):
    """Multiplies the factors of its parts."""

    parts: tuple[Schedule, ...]

    def __call__(self, samples: int) -> float:
        """Returns the product, 1 where there are no parts."""
        return math.prod(part(samples) for part in self.parts)


def linear_scaling(lr: float, *, batch_size: int, reference: int) -> float:
    """Scales `lr`, tuned for batches of `reference` samples, to `batch_size` samples per update (Goyal et al. 2017).

    Under BSP an update stands for the batches of all workers together; under the other policies for one worker's.
    """
    if batch_size < 1 or reference < 1:
        raise ConfigError(f"batch_size={batch_size}, reference={reference}: both must be at least 1 sample")
    return lr * batch_size / reference


def _check_total(total: int) -> None:
    if total < 1:
        raise ConfigError(f"a schedule over {total} samples: give the number of global samples of the whole run")
