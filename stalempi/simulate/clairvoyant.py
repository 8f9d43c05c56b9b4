"""Computes the clairvoyant bound: what the best capped policy could do if it knew the future."""

# Letters: p a worker, k its k-th iteration (from 1), U the cap (upper), N_p its pushes up to the horizon H (s),
# S(p, k) its service time (s), T(p, k) the time of its push under SSP(U), m(t) the least count at time t under SSP(U),
# M(k) when m reaches k, D(p, k) the latest time of a push.

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace

from stalempi.policy import SSP, Continue, Decision, Event, Push, Release
from stalempi.simulate.figures import Figures
from stalempi.simulate.network import Network
from stalempi.simulate.timing import Limit, simulate
from stalempi.simulate.workload import Workload

__all__ = ["clairvoyant"]


@dataclass
class _Seen:
    """One worker under SSP(U): its service times, its last release, and when it left (s)."""

    released: float = 0.0
    services: list[float] = field(default_factory=list)
    end: float | None = None


class _Watch:
    """Notes S(p, k) and M(k) of a run."""

    def __init__(self, policy: SSP, num_workers: int) -> None:
        self._policy = policy
        self.workers = [_Seen() for _ in range(num_workers)]
        self.rises: list[float] = []

    def __call__(self, event: Event, decisions: list[Decision]) -> None:
        worker = self.workers[event.worker]
        if isinstance(event, Push):
            worker.services.append(event.now - worker.released)
        else:
            worker.end = event.now
        for decision in decisions:
            if isinstance(decision, (Release, Continue)):
                self.workers[decision.worker].released = event.now
        self.rises.extend([event.now] * (self._policy.clocks.least - len(self.rises)))


def clairvoyant(workload: Workload, upper: int, *, seconds: float, network: Network | None = None) -> Figures:
    """Returns the figures of the best that any policy with the hard cap `upper` can do in `seconds` of a workload.

    Throughput. No capped policy is faster than SSP(U). Proof: let S(p, k) be given. Under a capped policy iteration k
    of p starts no earlier than its push k - 1 and no earlier than the moment when the least count reaches k - 1 - U;
    SSP(U) starts it exactly at the later of the two. By induction over the pushes in the order of their times, no push
    (p, k) and no M(k) of a capped policy is earlier than that of SSP(U) (Ho et al. 2013 bound the same from the other
    side). So the counts of SSP(U) are the largest at every moment.

    Gap. Keep SSP(U)'s progress: all of m(t), and the counts N_p at the horizon. Then push (p, k) must happen by

        D(p, k) = min(M(k), D(p, k + 1) - S(p, k + 1)),    D(p, N_p) = min(M(N_p), H),    M(k) = H where m < k,

    and its gap is at least k - m(D(p, k)), for m only rises. All bounds are met at once by the schedule that makes
    every push at D(p, k): T(p, k) <= D(p, k) by induction, with equality for the push that brings m to k, so m(t) is
    the same; and an iteration that starts later than under SSP(U) finds the same or a larger m, so the cap holds. Hence
    this is the least mean and the least largest gap with that progress. A policy that gives up progress can have less.

    Both need service times that do not depend on when an iteration starts. Where they do (a worker slow for a while; a
    network with queues) the times of the SSP(U) run are used, and the row is an estimate and no bound.

    The staleness is that of the same schedule; it is not minimised.
    """
    policy = SSP(upper)
    watch = _Watch(policy, workload.num_workers)
    stats = simulate(policy, workload, limit=Limit(seconds), network=network, observe=watch)
    latest = [_latest(worker, watch.rises, seconds) for worker in watch.workers]
    slack = 1e-9 * seconds  # so that rounding does not put a push before the rise that it coincides with
    gaps = [
        max(0, k - bisect_right(watch.rises, time + slack)) for times in latest for k, time in enumerate(times, start=1)
    ]
    stale = _staleness(latest, watch.workers, slack)
    pushes = max(1, len(gaps))
    known = Figures.of(stats)
    return replace(
        known,
        gap_mean=sum(gaps) / pushes,
        gap_max=max(gaps, default=0),
        staleness_mean=sum(stale) / pushes,
        staleness_max=max(stale, default=0),
    )


def _latest(worker: _Seen, rises: list[float], horizon: float) -> list[float]:
    """Returns D(p, 1) .. D(p, N_p)."""
    due = horizon if worker.end is None else worker.end
    times: list[float] = []
    for k in range(len(worker.services), 0, -1):
        due = min(due, rises[k - 1]) if k <= len(rises) else due
        times.append(due)
        due -= worker.services[k - 1]
    times.reverse()
    return times


def _staleness(latest: list[list[float]], workers: list[_Seen], slack: float) -> list[int]:
    """Counts, for each push, the pushes of others while its iteration ran."""
    order = sorted(time for times in latest for time in times)
    return [
        max(0, bisect_left(order, time - slack) - bisect_right(order, time - service + slack))
        for times, worker in zip(latest, workers, strict=True)
        for time, service in zip(times, worker.services, strict=True)
    ]
