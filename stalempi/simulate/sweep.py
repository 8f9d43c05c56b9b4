"""Runs many policies over many seeds, however one run is made, and sums each policy up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stalempi.errors import ConfigError
from stalempi.policy import CONTROLLERS, POLICIES, Policy, make_policy
from stalempi.simulate.figures import Figures
from stalempi.train.evaluate import Point

__all__ = ["Interval", "Outcome", "Row", "pareto_front", "parse_policies", "parse_policy", "sweep"]

_POSITIONAL = {"bsp": ("backup",), "asp": (), "ssp": ("bound",), "ssp-cached": ("bound",), "allreduce": ()}

# Two-sided 95% quantiles of Student's t for 1 .. 30 degrees of freedom; beyond, the normal one is within 2%.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Outcome:
    """One run: its figures, and its accuracy over time where it learned (the last point is the final model)."""

    figures: Figures
    curve: tuple[Point, ...] = ()

    def reached(self, accuracy: float) -> Point | None:
        """Returns the first evaluation of at least `accuracy`; None if there is none."""
        return next((point for point in self.curve if point.accuracy >= accuracy), None)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half the width of its 95% confidence interval (Student's t; NaN for one seed)."""

    mean: float
    half: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Returns the interval of at least one value."""
        count = len(values)
        if count == 1:
            return cls(values[0], math.nan, 1)
        quantile = _T95[count - 2] if count - 2 < len(_T95) else 1.96
        return cls(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(count), count)


@dataclass(frozen=True)
class Row:
    """All runs of one policy, one per seed; or, where `is_bound`, of what no policy can be."""

    label: str
    outcomes: tuple[Outcome, ...]
    is_bound: bool = False

    def mean(self, name: str) -> float:
        """Returns the mean over seeds of a figure by its name."""
        return statistics.fmean(getattr(outcome.figures, name) for outcome in self.outcomes)

    def largest_gap(self) -> int:
        """Returns the largest gap of all runs."""
        return max(outcome.figures.gap_max for outcome in self.outcomes)

    def until(self, accuracy: float, what: str) -> Interval | None:
        """Returns `what` ("seconds" or "samples") until `accuracy` over the seeds that reached it; None if none did."""
        points = [outcome.reached(accuracy) for outcome in self.outcomes]
        values = [float(getattr(point, what)) for point in points if point]
        return Interval.of(values) if values else None

    def final_accuracy(self) -> Interval | None:
        """Returns the accuracy of the final models; None where nothing was learned."""
        values = [outcome.curve[-1].accuracy for outcome in self.outcomes if outcome.curve]
        return Interval.of(values) if values else None


def sweep(labels: Iterable[str], seeds: Sequence[int], run: Callable[[str, int], Outcome]) -> list[Row]:
    """Runs every policy with every seed.

    Args:
        labels: policies as `parse_policy` reads them, or whatever else `run` understands.
        seeds: the same for every policy, so that all meet the same delays.
        run: makes one run; simulated, or a real job.
    """
    return [Row(label, tuple(run(label, seed) for seed in seeds)) for label in labels]


def parse_policies(text: str) -> list[str]:
    """Reads a comma-separated list of policies and returns it without repeats; ConfigError if one cannot be made."""
    labels = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not labels:
        raise ConfigError("give at least one policy, as in bsp,ssp:3,dssp:3:15")
    for label in labels:
        parse_policy(label)
    return labels


def parse_policy(text: str) -> Policy:
    """Makes a policy from one word: its name, and its options after colons.

    bsp[:BACKUP], asp, ssp:BOUND, ssp-cached:BOUND, allreduce,
    dssp:LOWER:UPPER[:CONTROLLER[:PREDICTOR[:PARAMETER]]], where PREDICTOR is ema, last or mean-std.
    """
    name, *words = text.split(":")
    if name not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {text!r}")
    if name == "dssp":
        return _parse_dssp(text, words)
    takes = _POSITIONAL[name]
    if len(words) > len(takes):
        raise ConfigError(f"policy {text!r} has more options than {name} takes: {', '.join(takes) or 'none'}")
    return make_policy(name, **{key: _whole(text, word) for key, word in zip(takes, words, strict=False)})


def _parse_dssp(text: str, words: list[str]) -> Policy:
    if len(words) < 2:
        raise ConfigError(f"policy {text!r} needs lower and upper, as in dssp:3:15")
    options: dict[str, object] = {"lower": _whole(text, words[0]), "upper": _whole(text, words[1])}
    if len(words) > 2:
        if words[2] not in CONTROLLERS:
            raise ConfigError(f"policy {text!r}: controller must be one of {', '.join(CONTROLLERS)}")
        options["controller"] = words[2]
    if len(words) > 3:
        options["predictor"] = ":".join(words[3:])
    return make_policy("dssp", **options)


def _whole(text: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ConfigError(f"policy {text!r}: {word!r} is not a whole number") from None


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the places of the points that no other beats: less of the first and more of the second coordinate.

    Args:
        points: (cost, gain) pairs, such as (mean staleness, throughput).

    In ascending order of cost; of equal points the first.
    """
    front: list[int] = []
    best = -math.inf
    for place in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[place][1] > best:
            front.append(place)
            best = points[place][1]
    return front
