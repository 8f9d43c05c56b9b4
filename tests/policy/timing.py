"""Runs a policy under a virtual clock: a private, plain twin of the simulator, for tests of the policies alone."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stalempi.policy import Continue, Decision, Leave, Policy, Push, Release

Service = Callable[[int, float], "float | None"]


def drive(policy: Policy, num_workers: int, service: Service, *, until: float) -> Iterator[Push]:
    """Yields each push, counted but not yet acted on, until time `until` (s).

    `service(worker, now)` is the time (s) of the iteration that starts at `now`; None: the worker leaves instead.
    """
    due: list[tuple[float, int]] = []

    def carry_out(decisions: list[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, (Release, Continue)):
                seconds = service(decision.worker, now)
                if seconds is None:
                    carry_out(policy.on_leave(Leave(decision.worker, now)), now)
                else:
                    heapq.heappush(due, (now + seconds, decision.worker))

    carry_out(policy.start(num_workers, 0.0), 0.0)
    while due and due[0][0] <= until:
        now, worker = heapq.heappop(due)
        decisions = policy.on_push(Push(worker, now))
        yield Push(worker, now)
        carry_out(decisions, now)


@dataclass(frozen=True)
class Outcome:
    """Updates per second, and the mean and the largest gap at a push."""

    throughput: float
    mean_gap: float
    max_gap: int


def outcome(policy: Policy, num_workers: int, service: Service, *, until: float) -> Outcome:
    """Runs to the end and sums up."""
    gaps = [policy.clocks.gap(push.worker) for push in drive(policy, num_workers, service, until=until)]
    return Outcome(len(gaps) / until, sum(gaps) / len(gaps), max(gaps))


def scenario(name: str, num_workers: int, *, seed: int, until: float) -> Service:
    """Returns the service times of a named scenario; each worker has its own random stream."""
    streams = [random.Random(f"{name} {worker} {seed}") for worker in range(num_workers)]
    speeds = {"straggler": (1, 1, 1, 3), "pair": (1, 1.9), "mixed": (1, 1.2, 1.5, 2)}.get(name, (1,) * num_workers)

    def service(worker: int, now: float) -> float | None:
        draw = streams[worker]
        seconds = speeds[worker] * max(0.1, draw.gauss(1.0, 0.0 if name == "homogeneous" else 0.1))
        if name in ("stalls", "dies") and draw.random() < 0.03:
            seconds *= 6.0
        if name == "rotating" and int(now / 40.0) % num_workers == worker:
            seconds *= 2.0
        return None if name == "dies" and worker == 1 and now > until / 3 else seconds

    return service


SCENARIOS = {
    "homogeneous": 4,
    "jitter": 4,
    "stalls": 4,
    "rotating": 4,
    "straggler": 4,
    "pair": 2,
    "mixed": 4,
    "dies": 4,
}
