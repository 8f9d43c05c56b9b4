"""Runs a policy under a virtual clock: who pushes when, who waits, how large the gaps are; no gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stalempi.errors import ConfigError
from stalempi.policy import Apply, Continue, Decision, Drop, Event, Leave, Policy, Push, Release
from stalempi.simulate.agenda import Agenda, Kind
from stalempi.simulate.network import Network, Wire
from stalempi.simulate.workload import Workload
from stalempi.stats import RunStats, WorkerStats

__all__ = ["Limit", "simulate"]

Observe = Callable[[Event, list[Decision]], None]


@dataclass(frozen=True)
class Limit:
    """When a run ends: cut off at `seconds`, or by workers that leave once `pushes` have been applied."""

    seconds: float = math.inf
    pushes: int | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"seconds must be above 0, got {self.seconds:g}")
        if self.pushes is not None and self.pushes < 1:
            raise ConfigError(f"pushes must be at least 1, got {self.pushes}")


@dataclass(slots=True)
class _Worker:
    """What the server knows of a worker, and when the worker last sent something (s)."""

    stats: WorkerStats
    sent: float = 0.0
    version: int = 0
    waiting: bool = False


class _Run:
    def __init__(self, policy: Policy, workload: Workload, limit: Limit, network: Network) -> None:
        self._policy, self._limit = policy, limit
        self._wire = Wire(network, workload.num_workers)
        self._agenda = Agenda(workload, self._wire)
        self.stats = RunStats([WorkerStats() for _ in range(workload.num_workers)])
        self._workers = [_Worker(stats) for stats in self.stats.workers]

    def run(self, observe: Observe | None) -> None:
        """Takes messages in the order in which they reach the server's link, until the limit or until all have left."""
        policy, agenda, horizon = self._policy, self._agenda, self._limit.seconds
        policy.start(len(self._workers), 0.0)
        for number in range(len(self._workers)):
            agenda.start_iteration(number, 0.0)
        while entry := agenda.next(horizon):
            reached, number, kind, sent = entry
            if not policy.clocks.active[number]:
                continue
            now = self._wire.push(reached) if kind is Kind.PUSH else self._wire.leave(reached)
            if now > horizon:
                break
            event = Push(number, now) if kind is Kind.PUSH else Leave(number, now)
            decisions = self._take(event, sent)
            self._carry_out(decisions)
            if observe:
                observe(event, decisions)
        self._end()

    def _take(self, event: Event, sent: float) -> list[Decision]:
        worker = self._workers[event.worker]
        stats = worker.stats
        stats.ended = event.now
        if isinstance(event, Leave):
            if worker.waiting:
                stats.waited += event.now - worker.sent
                worker.waiting = False
            return self._policy.on_leave(event)
        worker.sent, worker.waiting = sent, True
        decisions = self._policy.on_push(event)
        stats.iterations += 1
        stats.count_gap(self._policy.clocks.gap(event.worker))
        return decisions

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Release):
                self._workers[decision.worker].version = self.stats.updates
                self._go_on(decision.worker, self._wire.release(decision.worker))
            elif isinstance(decision, Apply):
                self._apply(decision.workers)
            elif isinstance(decision, Continue):
                self._go_on(decision.worker, self._wire.release(decision.worker, empty=True))
            else:
                assert isinstance(decision, Drop)
                self._workers[decision.worker].stats.dropped += 1

    def _apply(self, workers: Sequence[int]) -> None:
        for number in workers:
            worker = self._workers[number]
            worker.stats.count_staleness(self.stats.updates - worker.version)
            worker.stats.samples += 1
        self.stats.updates += 1
        self.stats.samples += len(workers)

    def _go_on(self, number: int, received: float) -> None:
        worker = self._workers[number]
        worker.stats.waited += received - worker.sent
        worker.waiting = False
        if self._limit.pushes is not None and self.stats.samples >= self._limit.pushes:
            self._agenda.send(number, received, Kind.LEAVE)
        else:
            self._agenda.start_iteration(number, received)

    def _end(self) -> None:
        """Ends the books: with the last leave, or at the horizon."""
        active = self._policy.clocks.active
        self.stats.ended = self._limit.seconds if any(active) else max(w.stats.ended for w in self._workers)
        assert not math.isinf(self.stats.ended), "some workers wait for ever"
        for number, worker in enumerate(self._workers):
            if active[number]:
                worker.stats.ended = self.stats.ended
                if worker.waiting:
                    worker.stats.waited += self.stats.ended - worker.sent


def simulate(
    policy: Policy,
    workload: Workload,
    *,
    limit: Limit,
    network: Network | None = None,
    observe: Observe | None = None,
) -> RunStats:
    """Runs `policy` over a workload and returns the same figures as a real run; a push counts as one sample.

    Args:
        policy: started here.
        workload: who computes for how long; consumed.
        limit: when the run ends. A workload without end needs one.
        network: what messages cost; nothing by default.
        observe: called with every event and the decisions that followed, as by the server.

    A push costs one push and one pop of a heap of at most two entries per worker, so O(log P), and the policy's own
    time.
    """
    run = _Run(policy, workload, limit, network or Network())
    run.run(observe)
    return run.stats
