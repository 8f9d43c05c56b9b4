"""Narrows [lower, upper] over training: wide early, fresh late."""

from __future__ import annotations

from dataclasses import dataclass

from stalempi.errors import ConfigError
from stalempi.policy.checks import check_whole

__all__ = ["Narrowing"]


@dataclass(frozen=True, slots=True)
class Narrowing:
    """Brings the upper threshold down to the lower one, in a straight line between two counts of pushes.

    Args:
        begin: pushes of all workers together, up to which the upper threshold holds in full.
        end: pushes from which on the lower threshold is the only one; not before `begin`.
    """

    begin: int
    end: int

    def __post_init__(self) -> None:
        check_whole("begin of narrow", self.begin)
        check_whole("end of narrow", self.end)
        if self.end < self.begin:
            raise ConfigError(f"narrow must not end before it begins, got {self.begin} and {self.end}")

    def upper_at(self, pushes: int, *, lower: int, upper: int) -> int:
        """Returns the upper threshold after `pushes` pushes, rounded up to a whole number."""
        if pushes < self.begin:
            return upper
        if pushes >= self.end:
            return lower
        return lower + -(-(upper - lower) * (self.end - pushes) // (self.end - self.begin))
