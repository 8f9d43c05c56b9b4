"""Drives a policy by hand, one event at a time, under the eyes of a referee."""

from __future__ import annotations

import pickle

import pytest

from stalempi.errors import ProtocolError
from stalempi.policy import Apply, Continue, Decision, Leave, Policy, Push, Release

from .referee import MayWait, Referee


class Watched:
    """A policy with its referee; events come 1 s apart unless told otherwise."""

    def __init__(self, policy: Policy, referee: Referee) -> None:
        self.policy = policy
        self.referee = referee
        self.now = 0.0
        referee.start(policy.start(len(referee.counts), 0.0))

    def push(self, worker: int, at: float | None = None) -> list[Decision]:
        event = Push(worker, self._time(at))
        decisions = self.policy.on_push(event)
        self.referee.see(event, decisions)
        return decisions

    def leave(self, worker: int, at: float | None = None) -> list[Decision]:
        event = Leave(worker, self._time(at))
        decisions = self.policy.on_leave(event)
        self.referee.see(event, decisions)
        return decisions

    def goes_on(self, worker: int, at: float | None = None) -> bool:
        """Pushes, and returns whether the worker itself may go on at once."""
        self.push(worker, at)
        return self.policy.is_running(worker)

    def refuses(self, event: Push | Leave) -> None:
        """Checks that `event` raises ProtocolError and changes nothing."""
        before = pickle.dumps(self.policy)
        with pytest.raises(ProtocolError):
            self.policy.on_push(event) if isinstance(event, Push) else self.policy.on_leave(event)
        assert pickle.dumps(self.policy) == before

    def finish(self) -> None:
        for worker in sorted(self.referee.members):
            self.leave(worker)
        self.referee.finish()

    def _time(self, at: float | None) -> float:
        self.now = self.now + 1.0 if at is None else at
        return self.now


class Watch:
    """Makes watched policies and remembers them for the teardown."""

    def __init__(self) -> None:
        self.made: list[Watched] = []

    def __call__(
        self, policy: Policy, num_workers: int, *, drops: bool = False, may_wait: MayWait | None = None
    ) -> Watched:
        self.made.append(Watched(policy, Referee(num_workers, policy.bound, drops=drops, may_wait=may_wait)))
        return self.made[-1]


def applied(decisions: list[Decision]) -> list[tuple[int, ...]]:
    """Returns the workers of each Apply."""
    return [decision.workers for decision in decisions if isinstance(decision, Apply)]


def freed(decisions: list[Decision]) -> list[int]:
    """Returns the workers that may go on, in order."""
    return [decision.worker for decision in decisions if isinstance(decision, (Release, Continue))]
