"""Walks every interleaving of pushes, leaves and losses through a policy, breadth first, a referee at every step."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stalempi.policy import Event, Leave, Policy, Push

from .referee import LawError, Referee

Moments = Callable[[float], Iterable[float]]
History = tuple[Event, ...]


@dataclass(frozen=True)
class Survey:
    """How much was explored: different states, transitions between them, and the longest shortest history to one."""

    states: int
    transitions: int
    depth: int


@dataclass(frozen=True)
class Limits:
    """Where the walk ends: nobody pushes more than `pushes` times; `events` bounds the length of a history.

    `moments` gives the times at which the event after one at `now` may come: one for a policy that does not look at the
    time, a few for one that does. Without `leaves` nobody leaves or is lost.
    """

    pushes: int
    events: int | None = None
    leaves: bool = True
    moments: Moments = lambda now: (0.0,)


class BrokenLawError(LawError):
    """A law is broken, and `history` is a shortest way there."""

    def __init__(self, why: LawError, history: History) -> None:
        super().__init__(f"{why}, after {len(history)} events: {', '.join(map(str, history))}")
        self.history = history


def explore(policy: Policy, referee: Referee, limits: Limits) -> Survey:
    """Explores all states that `policy` can reach within `limits`; raises BrokenLawError at the first broken law.

    A state is everything that policy and referee hold, so histories that meet are followed once. Breadth first, so
    that the history of BrokenLawError is a shortest one.
    """
    referee.start(policy.start(len(referee.counts), 0.0))
    first = pickle.dumps((policy, referee))
    seen = {first}
    queue: deque[tuple[bytes, float, History]] = deque([(first, 0.0, ())])
    transitions = depth = 0
    while queue:
        state, now, history = queue.popleft()
        depth = len(history)
        if depth == limits.events:
            continue
        for event in _events(pickle.loads(state)[1], now, limits):
            transitions += 1
            successor = _step(state, event, history)
            if successor not in seen:
                seen.add(successor)
                queue.append((successor, event.now, (*history, event)))
    return Survey(len(seen), transitions, depth)


def _events(referee: Referee, now: float, limits: Limits) -> Iterable[Event]:
    for worker in sorted(referee.members):
        for moment in limits.moments(now):
            if worker in referee.running and referee.counts[worker] < limits.pushes:
                yield Push(worker, moment)
            if limits.leaves:
                yield Leave(worker, moment)


def _step(state: bytes, event: Event, history: History) -> bytes:
    policy, referee = pickle.loads(state)
    try:
        referee.see(event, policy.on_push(event) if isinstance(event, Push) else policy.on_leave(event))
        if not referee.members:
            referee.finish()
    except LawError as violation:
        raise BrokenLawError(violation, (*history, event)) from violation
    return pickle.dumps((policy, referee))
