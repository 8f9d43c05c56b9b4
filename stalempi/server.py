"""Decides: rank 0 asks the policy after every push, and does what it says; knows no MPI."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from stalempi.correction import Correction
from stalempi.errors import ConfigError
from stalempi.holder import Holder, ServerOptions
from stalempi.orders import Order, Orders
from stalempi.policy import CachedSSP
from stalempi.policy.base import Apply, Continue, Decision, Drop, Event, Leave, Policy, Push, Release
from stalempi.replica import Replica
from stalempi.silence import CHECK_EVERY, Silence
from stalempi.slots import combine_buffers
from stalempi.stats import RunStats
from stalempi.transport.base import Transport
from stalempi.transport.message import Flag, Header, Kind

__all__ = ["Attendant", "Server", "ServerOptions"]


class Attendant(Protocol):
    """Whoever looks after a server while it serves: checkpoints and preemption (see `train/keeper.py`)."""

    def started(self, now: float) -> None:
        """Is called once the policy has been started, at `now` (s)."""

    def between(self, now: float) -> None:
        """Is called at `now` (s) after every event, and at least every CHECK_EVERY seconds."""

    def ended(self) -> None:
        """Is called when every worker has left, unless the server was drained."""


class Server(Holder):
    """Rank 0 of a data-parallel job.

    Args:
        replica: the model and optimizer that gradients are applied to, in place; of several servers, rank 0's share.
        policy: decides; started by `serve`.
        transport: reaches the workers.
        options: see `ServerOptions`.
        correction: mends stale gradients; not for a policy that lets workers go on with their own copy.
        observe: is called with every event and the decisions that followed, after they were carried out.
        orders: tells the other servers what to do with their shares.

    Attributes:
        attendant: looks after it; None: nobody does.
        preempt_asked: whether a worker has said that it was asked to end.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        replica: Replica,
        policy: Policy,
        transport: Transport,
        *,
        options: ServerOptions | None = None,
        correction: Correction | None = None,
        observe: Callable[[Event, list[Decision]], None] | None = None,
        orders: Orders | None = None,
    ) -> None:
        if correction and isinstance(policy, CachedSSP):
            raise ConfigError(f"correction {correction.name} needs releases, but {policy} lets workers do without")
        super().__init__(replica, transport, options=options, correction=correction)
        self.policy, self._observe = policy, observe
        self._orders = orders or Orders([], len(self._slots))
        self.attendant: Attendant | None = None
        self.preempt_asked = False
        self._absent: set[int] = set()  # waited when the checkpoint was taken, and have not said that they are here
        self._postponed: dict[int, bool] = {}  # their releases, by whether they are empty

    def drain(self) -> None:
        """Tells every worker to leave, now or at its next push, which is then not applied: the job is preempted."""
        self.draining = True
        self._orders.add(Order.DRAIN)
        self._carry_out([Continue(w) for w in self.policy.clocks.workers() if not self.policy.is_running(w)])

    def serve(self) -> RunStats:
        """Serves until every worker has left; the model then holds the final parameters and running statistics."""
        now = self.options.now()
        self.stats.started = now
        for stats in self.stats.workers:
            stats.started = now
        limits = {"warning": self.options.stall_warning, "timeout": self.options.stall_timeout}
        self._silence = Silence(self._ranks, now, **limits)
        self.policy.start(len(self._slots), now)  # everybody has the first parameters since joining
        if self.attendant:
            self.attendant.started(now)
        self._absent = {worker for worker in self.policy.clocks.workers() if not self.policy.is_running(worker)}
        while self.policy.clocks.num_active:
            for worker in self._end.receive(timeout=CHECK_EVERY):
                self._handle(worker, self.options.now())
                self._attend()
            self._attend()
            self._silence.check(self.policy, self.options.now())
        self.stats.ended = self.options.now()
        if self.attendant and not self.draining:
            self.attendant.ended()
        self.gather()
        self._orders.end()
        for stats, more in zip(self.stats.workers, self._orders.bytes_pushed, strict=True):
            stats.bytes_pushed += more
        self._end.close(self.options.stall_timeout)
        self.combine_buffers()
        return self.stats

    def combine_buffers(self) -> None:
        """Makes the model's buffers (running statistics) what all workers' together say, so that it evaluates right."""
        samples = {worker: stats.samples for worker, stats in enumerate(self.stats.workers)}
        combine_buffers(self.replica.buffers, {w: slot.buffers for w, slot in enumerate(self._slots)}, samples)

    def gather(self) -> None:
        """Brings the other servers' shares to this rank's model, at the version that its own has."""
        self._orders.gather()

    @property
    def orders(self) -> Orders:
        """What tells the other servers, if there are any."""
        return self._orders

    def _attend(self) -> None:
        if self.attendant and not self.draining:
            self.attendant.between(self.options.now())

    def _handle(self, worker: int, now: float) -> None:
        slot = self._slots[worker]
        header = Header.unpack(slot.packet.header)
        self._silence.broken(worker, now)
        slot.step = header.step
        if header.flags & Flag.WAITING:
            self._orders.add(Order.SKIP, worker)
            self._arrived(worker)
        elif self.draining:
            self._orders.add(Order.SKIP, worker)
            self._turn_away(worker, header, now)
        else:
            self._decide(worker, header, now)
        self._orders.send()  # where nothing was to be done

    def _decide(self, worker: int, header: Header, now: float) -> None:
        """Takes what `worker` sent, and does what the policy says of it."""
        self._orders.add(Order.TAKE, worker)
        self.take(worker, header)
        stats = self.stats.workers[worker]
        self.preempt_asked = self.preempt_asked or bool(header.flags & Flag.PREEMPT)
        stats.ended = now
        if not math.isnan(header.waited):
            stats.waited += header.waited
            stats.hidden += header.hidden
        event: Event
        if header.kind is Kind.LEAVE:
            event = Leave(worker, now)
            decisions = self.policy.on_leave(event)
        else:
            event = Push(worker, now)
            decisions = self.policy.on_push(event)
            stats.count_gap(self.policy.clocks.gap(worker))
        self._carry_out(decisions)
        if self._observe:
            self._observe(event, decisions)

    def _arrived(self, worker: int) -> None:
        """Takes note that a worker is here for the release that was due to it before the checkpoint."""
        self._absent.discard(worker)
        if worker in self._postponed:
            self._carry_out([Continue(worker) if self._postponed.pop(worker) else Release(worker)])

    def _turn_away(self, worker: int, header: Header, now: float) -> None:
        """Answers a push that came after the last checkpoint; it is in none, so whoever resumes makes it again."""
        if header.kind is Kind.LEAVE:
            self.policy.on_leave(Leave(worker, now))
        else:
            self._carry_out([Continue(worker)])

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        """Tells the other servers first, so that all of them work at the same time."""
        for decision in decisions:
            if isinstance(decision, Apply) or decision.worker not in self._absent:
                self._orders.add_decision(decision)
        self._orders.send()
        rest = deque(decisions)
        while rest:
            match rest.popleft():
                case Apply(workers):
                    self._apply(workers, rest)
                case Release(worker):
                    self._release(worker)
                case Continue(worker):
                    self._release(worker, empty=True)
                case Drop(worker):
                    self.drop(worker)

    def _apply(self, workers: Sequence[int], rest: deque[Decision]) -> None:
        """Makes an update, and with it the releases that are the next decisions in `rest`."""
        released = []
        while rest and isinstance(rest[0], Release) and rest[0].worker not in self._absent:
            released.append(rest[0].worker)
            rest.popleft()
        self.apply(workers, released)
        for worker in released:
            self._silence.broken(worker, self.options.now())

    def _release(self, worker: int, *, empty: bool = False) -> None:
        if worker in self._absent:
            self._postponed[worker] = empty
            return
        self.release(worker, empty=empty)
        self._silence.broken(worker, self.options.now())
