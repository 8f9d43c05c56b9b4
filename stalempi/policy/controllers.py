"""Defines what a controller of DSSP is: it names the threshold under which a worker that has pushed may go on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from stalempi.policy.clocks import Clocks

__all__ = ["Controller"]


class Controller(ABC):
    """Chooses a threshold in [lower, upper] for one worker at one moment.

    Args:
        lower, upper: s_L and s_U, already checked.

    The policy tells it of every release, push and leave, in the order of receipt; times are seconds of the server's
    clock. It sees the clocks after the push or leave was counted.
    """

    name: ClassVar[str]
    clocks: Clocks

    def __init__(self, lower: int, upper: int) -> None:
        self.lower = lower
        self.upper = upper

    @property
    def bound(self) -> int | None:
        """The largest gap at which this controller lets a worker start; None if there is none."""
        return self.upper

    @abstractmethod
    def start(self, clocks: Clocks, now: float) -> None:
        """Begins a run; `clocks` stays the policy's and is only read."""

    def released(self, worker: int, now: float) -> None:
        """Is told that `worker` goes on at `now`."""
        return

    def left(self, worker: int, now: float) -> None:
        """Is told that `worker` has left at `now`."""
        return

    @abstractmethod
    def state(self, now: float) -> dict[str, Any]:
        """Returns what it has learned by `now` (s), as plain values; times as ages."""

    @abstractmethod
    def load_state(self, state: dict[str, Any], now: float) -> None:
        """Goes on from a `state` at `now` (s), `start` having begun; the clocks are those of the state already."""

    @abstractmethod
    def threshold(self, worker: int, now: float) -> int:
        """Takes the push of `worker` at `now` and returns the largest gap at which it may go on."""
