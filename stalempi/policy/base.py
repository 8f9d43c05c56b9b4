"""Defines what a policy is: events in, decisions out, and the one definition of the gap.

Rules of this folder:

1. Pure: the standard library only, no clock, no random numbers, no I/O. Time arrives in the event.
2. A decision is a value; somebody else carries it out (the server, the simulator, a test).
3. The gap is defined here and nowhere else. c_p is the number of pushes received from worker p, m the least c among
   the workers still in, and the gap of p is c_p - m. Worker p may start its next iteration iff its gap <= bound, so no
   gap is ever larger than bound + 1 at a push.
4. A worker that has left no longer counts in m, and nobody waits for it.

A worker is always in one of three states; every other move is a ProtocolError and changes nothing:

                     Push                          Leave
      [running] ------------> [waiting]     either ------> [left]
          ^                      |
          +----------------------+
            Release or Continue
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from stalempi.errors import ConfigError, ProtocolError
from stalempi.policy.clocks import Clocks

__all__ = ["Apply", "Clocks", "Continue", "Decision", "Drop", "Event", "Leave", "Policy", "Push", "Release"]


@dataclass(frozen=True, slots=True)
class Push:
    """Worker `worker` has pushed a gradient; the server received it at `now` (seconds, the server's clock)."""

    worker: int
    now: float


@dataclass(frozen=True, slots=True)
class Leave:
    """Worker `worker` has left (no more data, or lost) at `now`; a gradient of it that waits is still to be applied."""

    worker: int
    now: float


@dataclass(frozen=True, slots=True)
class Apply:
    """Make one update with the sample-weighted mean of the waiting gradients of `workers` (ascending)."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard the waiting gradient of `worker`: it came too late for its round (backup workers only)."""

    worker: int


@dataclass(frozen=True, slots=True)
class Release:
    """Send the current parameters to `worker`, and with them leave to go on."""

    worker: int


@dataclass(frozen=True, slots=True)
class Continue:
    """Give `worker` leave to go on without parameters: its copy plus its own update is fresh enough (SSP, cached)."""

    worker: int


Event = Push | Leave
Decision = Apply | Drop | Release | Continue


class Policy(ABC):
    """Decides when a worker may go on.

    A policy is constructed from its options alone, on every rank alike; `start` gives it its workers. Feed it every
    event in the order of receipt and carry out the decisions it returns in their order.

    A subclass says what follows a push (`_pushed`) and a leave (`_left`); both find the clocks already moved on.

    Attributes:
        run_ahead: iterations that a worker may have begun before the release of the push before them is sent. Whoever
            runs ahead has pushed, when that release comes, or is about to; so the release of push c is leave to start
            iteration c + run_ahead, and needs c + run_ahead - m <= bound.
    """

    name: ClassVar[str]
    has_server: ClassVar[bool] = True  # False: every rank is a worker, and all add up together
    clocks: Clocks
    run_ahead: int = 0

    def start(self, num_workers: int, now: float) -> list[Decision]:
        """Begins a run of `num_workers` workers at `now` (s) and releases them all; forgets any earlier run."""
        if num_workers < 1:
            raise ConfigError(f"a policy needs at least 1 worker, got {num_workers}")
        self.clocks = Clocks(num_workers)
        self._running = [False] * num_workers
        self._begin(num_workers, now)
        return self._release(range(num_workers), now)

    def let_run_ahead(self) -> None:
        """Lets every worker begin an iteration before its release: it then counts as one more in the bound.

        Raises ConfigError where the bound leaves no room for that.
        """
        raise ConfigError(
            f"run-ahead: under {self} a worker waits for each release: take asp, or ssp or dssp with s >= 1"
        )

    @property
    def bound(self) -> int | None:
        """The largest gap at which a worker may start an iteration; None if there is no bound."""
        return None

    def state(self, now: float) -> dict[str, Any]:
        """Returns what the policy holds at `now` (s), as plain values that JSON can hold; times as ages."""
        return {"clocks": self.clocks.state(), "running": list(self._running), **self._state(now)}

    def load_state(self, state: dict[str, Any], now: float) -> None:
        """Goes on from a `state`, at `now` (s), where `start` has just begun a run of as many workers.

        It then decides as the policy of that state would, time having stood still in between. Raises ConfigError, and
        changes nothing, if the state is of another number of workers.
        """
        if len(state["running"]) != len(self._running):
            raise ConfigError(
                f"the state is of {len(state['running'])} workers, this run has {len(self._running)}: start anew"
            )
        self.clocks.load_state(state["clocks"])
        self._running = [bool(running) for running in state["running"]]
        self._load_state(state, now)

    def is_running(self, worker: int) -> bool:
        """Returns whether `worker` is in and computing (released and not pushed since)."""
        return self.clocks.is_active(worker) and self._running[worker]

    def on_push(self, event: Push) -> list[Decision]:
        """Takes a push and returns what to do now.

        Raises ProtocolError, and changes nothing, if the worker has left or is not running (it has pushed already and
        was not released).
        """
        worker = event.worker
        self.clocks.check(worker)
        if not self._running[worker]:
            raise ProtocolError(f"worker {worker} pushed twice without a release in between")
        self._running[worker] = False
        self.clocks.push(worker)
        return self._pushed(event)

    def on_leave(self, event: Leave) -> list[Decision]:
        """Takes a leave and returns what to do now.

        Raises ProtocolError, and changes nothing, if the worker has left before or never was. A worker may leave
        while it runs and (lost) while it waits.
        """
        self.clocks.leave(event.worker)
        self._running[event.worker] = False
        return self._left(event)

    @abstractmethod
    def options(self) -> dict[str, int | float | str]:
        """Returns the options as they were given, for fingerprints and reports."""

    def __str__(self) -> str:
        inner = ", ".join(f"{key}={value}" for key, value in self.options().items())
        return f"{self.name}({inner})"

    def _begin(self, num_workers: int, now: float) -> None:
        """Sets up what a subclass keeps for one run; nobody is released yet."""
        return

    def _state(self, now: float) -> dict[str, Any]:
        """Returns what a subclass keeps for one run; times as ages at `now` (s)."""
        return {}

    def _load_state(self, state: dict[str, Any], now: float) -> None:
        """Takes over what `_state` returned; the clocks are those of the state already."""
        return

    @abstractmethod
    def _pushed(self, event: Push) -> list[Decision]:
        """Returns the decisions after a valid push; the worker is waiting and its push is counted."""

    @abstractmethod
    def _left(self, event: Leave) -> list[Decision]:
        """Returns the decisions after a valid leave; the worker no longer counts."""

    def _release(self, workers: Iterable[int], now: float) -> list[Decision]:
        """Marks `workers` as running from `now` on and returns the releases, in the same order."""
        decisions: list[Decision] = []
        for worker in workers:
            self._running[worker] = True
            self._on_release(worker, now)
            decisions.append(Release(worker))
        return decisions

    def _on_release(self, worker: int, now: float) -> None:
        """Is told of each release; for policies that measure service times."""
        return
