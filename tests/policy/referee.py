"""Watches a policy from outside and says which law of design.md a decision breaks; shares no code with the policies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from stalempi.policy import Apply, Continue, Decision, Drop, Event, Leave, Push, Release

MayWait = Callable[["Referee", int], bool]


class LawError(AssertionError):
    """A law is broken; the text says which."""


class Referee:
    """Keeps its own count of everything and checks each decision against laws 2 to 4, and liveness after each event.

    Args:
        num_workers: workers 0 .. num_workers - 1.
        bound: the largest gap at which a worker may start; None for none.
        drops: whether gradients may be dropped.
        may_wait: whether worker p, with its push counted and unreleased, has a reason to wait; None: do not ask.
    """

    def __init__(
        self, num_workers: int, bound: int | None, *, drops: bool = False, may_wait: MayWait | None = None
    ) -> None:
        self.bound = bound
        self.drops = drops
        self.may_wait = may_wait
        self.counts = [0] * num_workers
        self.members = set(range(num_workers))
        self.running: set[int] = set()
        self.gradients: set[int] = set()
        self.used = [0] * num_workers

    def gap(self, worker: int) -> int:
        return self.counts[worker] - min(self.counts[other] for other in self.members)

    def key(self) -> Hashable:
        return tuple(self.counts), frozenset(self.members), frozenset(self.running), frozenset(self.gradients)

    def start(self, decisions: Sequence[Decision]) -> None:
        """Checks the decisions of `Policy.start`: all are released, ascending."""
        law(list(decisions) == [Release(worker) for worker in sorted(self.members)], "start releases all")
        self.running = set(self.members)

    def see(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Checks one event with its decisions."""
        if isinstance(event, Push):
            self._push(event.worker)
        else:
            self._leave(event)
        for decision in decisions:
            self._decide(decision)
        self._afterwards()

    def finish(self) -> None:
        """Checks the end of a run: every push was used exactly once (law 4)."""
        law(not self.members, "the run is over when all have left")
        law(self.used == self.counts, f"law 4: pushes {self.counts}, applied or dropped {self.used}")

    def _push(self, worker: int) -> None:
        self.counts[worker] += 1
        self.running.remove(worker)
        self.gradients.add(worker)
        if self.bound is not None:
            gap = self.gap(worker)
            law(gap <= self.bound + 1, f"law 2: a gap of {gap} at a push under bound {self.bound}")

    def _leave(self, event: Leave) -> None:
        self.members.remove(event.worker)
        self.running.discard(event.worker)

    def _decide(self, decision: Decision) -> None:
        if isinstance(decision, Apply):
            law(list(decision.workers) == sorted(set(decision.workers)), "Apply names workers once, ascending")
            law(bool(decision.workers), "Apply names somebody")
            for worker in decision.workers:
                self._use(worker)
        elif isinstance(decision, Drop):
            law(self.drops, "law 4: this policy may drop nothing")
            self._use(decision.worker)
        else:
            self._go_on(decision)

    def _use(self, worker: int) -> None:
        law(worker in self.gradients, f"law 4: no gradient of worker {worker} waits")
        self.gradients.remove(worker)
        self.used[worker] += 1

    def _go_on(self, decision: Release | Continue) -> None:
        worker = decision.worker
        law(worker in self.members, f"law 3: worker {worker} has left")
        law(worker not in self.running, f"worker {worker} runs already")
        law(worker not in self.gradients, f"worker {worker} goes on before its own gradient is applied")
        if self.bound is not None:
            gap = self.gap(worker)
            law(gap <= self.bound, f"law 2: worker {worker} starts at a gap of {gap} under bound {self.bound}")
        self.running.add(worker)

    def _afterwards(self) -> None:
        if not self.members:
            law(not self.gradients, "law 4: a gradient is left over")
            return
        law(bool(self.running), "liveness: nobody can go on")
        if self.may_wait is not None:
            for worker in self.members - self.running:
                law(self.may_wait(self, worker), f"worker {worker} waits for nothing")


def law(holds: bool, text: str) -> None:
    if not holds:
        raise LawError(text)
