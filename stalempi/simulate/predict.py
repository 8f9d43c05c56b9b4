"""Predicts how long a run takes from the intervals of a recorded one."""

from __future__ import annotations

from dataclasses import dataclass, field

from stalempi.policy import Continue, Event, Policy, Push, Release
from stalempi.simulate.timing import Limit, simulate
from stalempi.simulate.workload import Loss, Workload
from stalempi.trace import Record, Trace

__all__ = ["predict", "recorded"]


@dataclass
class _Seen:
    """One worker of a trace: its service times (s), its last release, and how it left (s from the start)."""

    released: float
    services: list[float] = field(default_factory=list)
    running: bool = True
    farewell: float = 0.0
    lost: float | None = None

    def see(self, event: Event) -> None:
        if isinstance(event, Push):
            self.services.append(event.now - self.released)
            self.running = False
        elif self.running:
            self.farewell = event.now - self.released
        else:
            self.lost = event.now


def recorded(trace: Trace, *, again: bool = False) -> Workload:
    """Returns the workload of a recorded run: each worker's service times (push minus release) in order.

    A service time holds all that happened in between: computing, the messages on their way and the server's queue. So
    play it back over a network that costs nothing.

    Args:
        trace: of a real or a simulated run.
        again: whether a worker that has used up its times begins anew (to play another policy, under which it may make
            more iterations); else it leaves, as long after its last release as it did.
    """
    seen = _look(trace)

    def compute(worker: int, _: float) -> float | None:
        services, place = seen[worker].services, places[worker]
        places[worker] = place + 1
        if place < len(services):
            return services[place]
        return services[place % len(services)] if again and services else None

    places = [0] * len(seen)
    losses = tuple(Loss(w, one.lost, one.lost) for w, one in enumerate(seen) if one.lost is not None)
    return Workload(len(seen), compute, losses, tuple(one.farewell for one in seen))


def predict(trace: Trace, policy: Policy | None = None) -> float:
    """Returns the predicted wall time (s) of a run, from its start to the last leave.

    Args:
        trace: a recorded run, from which the service times are taken.
        policy: None: the policy of the trace, each worker making the iterations that it made. Another policy: the run
            ends after as many pushes in all, whoever makes them.
    """
    if policy is None:
        return simulate(trace.start.make_policy(), recorded(trace), limit=Limit()).seconds
    pushes = sum(isinstance(record.event, Push) for record in trace.records)
    return simulate(policy, recorded(trace, again=True), limit=Limit(pushes=max(1, pushes))).seconds


def _look(trace: Trace) -> list[_Seen]:
    begin = trace.start.now
    seen = [_Seen(0.0) for _ in range(trace.start.num_workers)]
    for record in trace.records:
        event = record.event
        seen[event.worker].see(type(event)(event.worker, event.now - begin))
        _see_releases(record, seen, event.now - begin)
    return seen


def _see_releases(record: Record, seen: list[_Seen], now: float) -> None:
    for decision in record.decisions:
        if isinstance(decision, (Release, Continue)):
            seen[decision.worker].released = now
            seen[decision.worker].running = True
