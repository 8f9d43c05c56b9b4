"""Runs a policy under a virtual clock: who pushes when, who waits, how large the gaps are; no gradients."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from stalempi.errors import ConfigError
from stalempi.policy import Apply, Continue, Decision, Drop, Event, Leave, Policy, Push, Release
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


class _Kind(IntEnum):
    LOST = 0
    LEAVE = 1
    PUSH = 2


@dataclass(slots=True)
class _Worker:
    """What the server knows of a worker, and when the worker last sent something (s)."""

    stats: WorkerStats
    dies: float = math.inf
    sent: float = 0.0
    version: int = 0
    waiting: bool = False


class _Run:
    def __init__(self, policy: Policy, workload: Workload, limit: Limit, network: Network) -> None:
        self._policy, self._limit = policy, limit
        self._compute = workload.compute
        self._wire = Wire(network)
        self.stats = RunStats([WorkerStats() for _ in range(workload.num_workers)])
        self._workers = [_Worker(stats) for stats in self.stats.workers]
        self._due: list[tuple[float, int, _Kind]] = []
        for loss in workload.losses:
            self._workers[loss.worker].dies = loss.at
            heapq.heappush(self._due, (loss.noticed, loss.worker, _Kind.LOST))

    def run(self, observe: Observe | None) -> None:
        """Takes messages in the order of their sending, which a wire keeps, until the limit or until all have left."""
        policy, due, horizon = self._policy, self._due, self._limit.seconds
        policy.start(len(self._workers), 0.0)
        for number in range(len(self._workers)):
            self._start_iteration(number, 0.0)
        while due and due[0][0] <= horizon:
            sent, number, kind = heapq.heappop(due)
            if not policy.clocks.active[number]:
                continue
            now = self._wire.push(sent) if kind is _Kind.PUSH else self._wire.leave(sent)
            if now > horizon:
                break
            event = Push(number, now) if kind is _Kind.PUSH else Leave(number, now)
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
                self._go_on(decision.worker, self._wire.release())
            elif isinstance(decision, Apply):
                self._apply(decision.workers)
            elif isinstance(decision, Continue):
                self._go_on(decision.worker, self._wire.release(empty=True))
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
            heapq.heappush(self._due, (received, number, _Kind.LEAVE))
        else:
            self._start_iteration(number, received)

    def _start_iteration(self, number: int, now: float) -> None:
        seconds = self._compute(number, now)
        kind = _Kind.LEAVE if seconds is None else _Kind.PUSH
        sent = now + (seconds or 0.0)
        if sent <= self._workers[number].dies:
            heapq.heappush(self._due, (sent, number, kind))

    def _end(self) -> None:
        """Ends the books: at the horizon where there is one, else with the last leave."""
        last = max(worker.stats.ended for worker in self._workers)
        self.stats.ended = last if math.isinf(self._limit.seconds) else self._limit.seconds
        for number, worker in enumerate(self._workers):
            if self._policy.clocks.active[number]:
                assert not math.isinf(self._limit.seconds), f"worker {number} waits for ever"
                worker.stats.ended = self.stats.ended
                if worker.waiting:
                    worker.stats.waited += max(0.0, self.stats.ended - worker.sent)


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
