"""Says how long the workers compute: drawn at random, listed in a file, or recorded in a trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stalempi.errors import ConfigError

__all__ = ["ComputeTime", "Loss", "Workload", "drawn", "listed", "parse_distribution", "read_intervals"]

ComputeTime = Callable[[int, float], "float | None"]
Distribution = Callable[[random.Random], float]


@dataclass(frozen=True)
class Loss:
    """Worker `worker` dies at `at` (s), whatever it is doing; the server notices at `noticed`."""

    worker: int
    at: float
    noticed: float


@dataclass(frozen=True)
class Workload:
    """Who computes, and for how long.

    Attributes:
        num_workers: workers 0 .. num_workers - 1.
        compute: compute(worker, now) -> seconds of the iteration that starts at `now`; None: the worker has no more
            data and leaves. Called once per iteration, in the order of the worker's iterations.
        losses: at most one per worker.
        farewell: seconds from a worker's last release until it leaves, for each worker; none by default.
    """

    num_workers: int
    compute: ComputeTime
    losses: tuple[Loss, ...] = ()
    farewell: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"a run needs at least 1 worker, got {self.num_workers}")


def streams(num_workers: int, seed: int) -> list[random.Random]:
    """Returns a random stream for each worker, so that one worker's draws do not depend on the others' timing."""
    return [random.Random(f"stalempi worker {worker} seed {seed}") for worker in range(num_workers)]


def drawn(distribution: Distribution, num_workers: int, *, seed: int) -> Workload:
    """Returns a workload in which every iteration of every worker takes a time (s) drawn from `distribution`."""
    draws = streams(num_workers, seed)
    return Workload(num_workers, lambda worker, _: distribution(draws[worker]))


_FAMILIES: dict[str, tuple[int, Callable[..., Distribution]]] = {
    "constant": (1, lambda seconds: lambda _: seconds),
    "uniform": (2, lambda low, high: lambda draw: draw.uniform(low, high)),
    "normal": (2, lambda mean, std: lambda draw: max(0.1 * mean, draw.gauss(mean, std))),
    "exponential": (1, lambda mean: lambda draw: draw.expovariate(1.0 / mean)),
    "lognormal": (2, lambda median, sigma: lambda draw: median * draw.lognormvariate(0.0, sigma)),
    "pareto": (2, lambda least, alpha: lambda draw: least * draw.paretovariate(alpha)),
}


def parse_distribution(text: str) -> Distribution:
    """Reads a distribution of seconds, such as "normal:1:0.1" (mean, std; never below a tenth of the mean).

    Others: constant:SECONDS, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:SIGMA, pareto:LEAST:ALPHA.
    Raises ConfigError for any other text.
    """
    name, *words = text.split(":")
    if name not in _FAMILIES:
        raise ConfigError(f"distribution must be one of {', '.join(_FAMILIES)}, got {text!r}")
    count, make = _FAMILIES[name]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ConfigError(f"distribution {text!r}: what follows {name} must be numbers") from None
    if len(numbers) != count or not all(0 <= number < float("inf") for number in numbers) or not numbers[0] > 0:
        raise ConfigError(f"distribution {text!r}: {name} takes {count} number(s), the first above 0, none negative")
    if name == "pareto" and numbers[1] == 0:
        raise ConfigError(f"distribution {text!r}: alpha must be above 0")
    return make(*numbers)


def listed(intervals: Sequence[Sequence[float]]) -> Workload:
    """Returns a workload with the compute times (s) of each worker in order, and from the start again at the end."""
    places = [0] * len(intervals)

    def compute(worker: int, _: float) -> float:
        row = intervals[worker]
        place = places[worker]
        places[worker] = place + 1
        return row[place % len(row)]

    return Workload(len(intervals), compute)


def read_intervals(path: Path) -> list[list[float]]:
    """Reads a file of compute times: one line a worker, seconds separated by commas or blanks; # begins a comment.

    Raises ConfigError that names the line which cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"intervals {path} cannot be read ({error})") from None
    rows: list[list[float]] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            rows.append([float(word) for word in words])
        except ValueError:
            raise ConfigError(f"intervals {path} line {number} holds something other than seconds") from None
        if not all(0 < seconds < float("inf") for seconds in rows[-1]):
            raise ConfigError(f"intervals {path} line {number}: every time must be above 0 s")
    if not rows:
        raise ConfigError(f"intervals {path} holds no times: give one line of seconds for each worker")
    return rows
