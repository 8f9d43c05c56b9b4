"""Makes several ranks one worker: their leader takes their pushes, pushes the sum, and hands the release on.

    member ── push ──> leader ── one push ──> server
    member <─ release ─ leader <── release ─── server

For its members a leader is what the server is for it. A member that has no more data leaves it, and the others go on; a
leader that has none itself goes on adding up until its members have left.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stalempi import preempt
from stalempi.errors import ConfigError, ProtocolError, StallError
from stalempi.flat import Flat
from stalempi.policy import CachedSSP, Policy
from stalempi.replica import Replica
from stalempi.silence import CHECK_EVERY
from stalempi.slots import Slot, combine_buffers, joined_rows, weighted_sum
from stalempi.transport.base import Packet, Transport, WorkerEnd
from stalempi.transport.message import Flag, Header, Kind

__all__ = ["Group", "LeaderEnd", "check_forward", "check_groups"]


def check_groups(policy: Policy, group_size: int) -> None:
    """Raises ConfigError if `policy` cannot have workers of `group_size` ranks."""
    if group_size > 1 and isinstance(policy, CachedSSP):
        raise ConfigError(f"{policy} lets a worker go on with its own copy, but a group has several: take plain ssp")


def check_forward(policy: Policy, group_size: int, *, run_ahead: bool, early_forward: bool) -> None:
    """Lets workers of `group_size` ranks run ahead under `policy`, if they are to.

    Raises ConfigError where they cannot, or cannot run forward while a release arrives.
    """
    if run_ahead and group_size > 1:
        raise ConfigError("run-ahead: a group's leader waits for its members: leave the group out, or the run-ahead")
    if early_forward and run_ahead:
        raise ConfigError("early-forward: a worker that runs ahead waits for no release at all: leave one of them out")
    if early_forward and group_size > 1:
        raise ConfigError("early-forward: a group's leader hands on whole releases: leave the group out, or the flag")
    if early_forward and not policy.has_server:
        raise ConfigError(f"early-forward: under {policy} nothing is released: leave it out")
    if run_ahead:
        policy.let_run_ahead()


@dataclass(frozen=True)
class Group:
    """A rank's place between the server and the other ranks of its worker.

    Attributes:
        server: rank that it pushes to: the server, or the leader of its group.
        members: ranks that push to it.
        patience: seconds from a release on without a push of a member before StallError; below the server's, which
            sees only that the whole group is silent and could not name the member.
    """

    server: int = 0
    members: Sequence[int] = ()
    patience: float = math.inf


class LeaderEnd(WorkerEnd):
    """The end of a worker that leads others; the clock of the group is its own.

    Args:
        replica: the leader's; a release is received straight into it and sent on from there.
        transport: reaches the server and the members.
        group: who they are.
        gradients: the leader's own.
        push, release: the leader's own packets: of `push` only the header is read, `release` is where releases arrive.

    Attributes:
        clock: the group's pushes so far.
        preempted: whether the latest release says that the job ends; a leader without data has no other way to know.
    """

    def __init__(
        self, replica: Replica, transport: Transport, group: Group, gradients: Flat, push: Packet, release: Packet
    ) -> None:
        self._replica, self._group, self._rank, self._release = replica, group, transport.rank, release
        self._ranks = [transport.rank, *group.members]
        note_bytes = len(replica.note(push))
        own = Slot(replica, gradients=gradients, buffers=replica.buffers, packet=push)
        self._slots = [own, *(Slot(replica, note_bytes=note_bytes) for _ in group.members)]
        self._samples = dict.fromkeys(range(len(self._slots)), 0)
        self._active = set(range(1, len(self._slots)))
        self._inner = transport.server_end(
            [slot.packet for slot in self._slots[1:]], [slot.release_header for slot in self._slots[1:]], group.members
        )
        total, buffers = replica.params.like(), replica.buffers.like()
        self._wire = replica.wire(total)
        packet = replica.push_packet(self._wire, buffers, note_bytes=note_bytes * len(self._slots))
        self._sum = Slot(replica, gradients=total, buffers=buffers, packet=packet)
        self._outer = transport.worker_end(self._sum.packet, release, group.server)
        self._parts = replica.release_parts()
        self.clock = 0
        self.preempted = False
        self._released = time.monotonic()

    def part(self, place: int) -> None:
        raise AssertionError("what a leader pushes is not there before its members' pushes")

    def progress(self) -> None:
        pass

    def push(self, *, empty: bool = False) -> None:
        del empty  # the header says so
        self._slots[0].push = Header.unpack(self._slots[0].packet.header)

    def receive(self, timeout: float) -> bool:
        self._gather()
        if not any(slot.push for slot in self._slots):
            return True  # the last member has left instead of pushing
        self._push_sum()
        if not self._outer.receive(timeout):
            return False
        self._hand_on()
        return True

    def leave(self, timeout: float) -> bool:
        while self._active:
            if not self.receive(timeout):
                return False
        self._inner.close(timeout)
        Header(Kind.LEAVE, self._rank, self._replica.layout, self.clock).pack_into(self._sum.packet.header)
        self._join_notes()
        return self._outer.leave(timeout)

    def close(self) -> None:
        self._outer.close()

    def _gather(self) -> None:
        """Waits until each member has pushed or left."""
        until = max(self._released + self._group.patience, time.monotonic() + CHECK_EVERY)
        while missing := [place for place in sorted(self._active) if self._slots[place].push is None]:
            for place in self._inner.receive(min(CHECK_EVERY, max(0.0, until - time.monotonic()))):
                self._take(place + 1)
            if time.monotonic() > until:
                ranks = ", ".join(str(self._ranks[place]) for place in missing)
                raise StallError(
                    f"rank(s) {ranks} did not push to rank {self._rank}, the leader of their group, in "
                    f"{self._group.patience:.0f} s: stuck or gone; raise stall_timeout if its steps take that long"
                )

    def _take(self, place: int) -> None:
        header, rank = Header.unpack(self._slots[place].packet.header), self._ranks[place]
        if header.kind is Kind.LEAVE:
            self._active.remove(place)
            self._slots[place].accept(header)
            return
        if header.layout != self._replica.layout:
            raise ProtocolError(f"rank {rank} step {header.step}: its layout is not the one agreed on")
        if header.step != self.clock + (not header.flags & Flag.WAITING):
            raise ProtocolError(f"rank {rank} sent step {header.step} to its group after step {self.clock}")
        self._slots[place].push = header
        self._slots[place].accept(header)

    def _push_sum(self) -> None:
        """Pushes the sample-weighted mean of the gradients that are here, as one that stands for all their samples."""
        pushes = {place: slot.take() for place, slot in enumerate(self._slots) if slot.push}
        # a release that is still being read would change under its reader
        if not self._inner.settle(self._parts, self._group.patience):
            raise StallError(f"a release was not received in the group of rank {self._rank}")
        full = {place: push for place, push in pushes.items() if push.nbytes}
        if full:
            self._add_up(full)
        if not any(push.flags & Flag.WAITING for push in pushes.values()):  # all of them wait, or none does
            self.clock += 1
        self._join_notes()
        self._header(list(pushes.values()), full).pack_into(self._sum.packet.header)
        self._outer.push(empty=not full)

    def _join_notes(self) -> None:
        """Makes the group's note all ranks' notes, the leader's first."""
        own = bytes(self._replica.note(self._slots[0].packet))
        self._replica.note(self._sum.packet)[:] = b"".join([own, *(slot.note for slot in self._slots[1:])])

    def _add_up(self, pushes: Mapping[int, Header]) -> None:
        samples = sum(push.samples for push in pushes.values())
        slots = [self._slots[place] for place in pushes]
        weighted_sum(self._sum.gradients, [s.gradients for s in slots], [p.samples / samples for p in pushes.values()])
        for place, push in pushes.items():
            self._samples[place] += push.samples
        combine_buffers(self._sum.buffers, {n: slot.buffers for n, slot in enumerate(self._slots)}, self._samples)
        self._sum.hyper[:] = slots[0].hyper
        self._sum.touched[:] = np.any([slot.touched for slot in slots], axis=0)
        for place, rows in joined_rows(slots).items():
            self._wire.rows[place].rows = rows
        self._wire.encode()
        self._sum.packet.parts.lengths = self._wire.lengths

    def _header(self, pushes: Sequence[Header], full: Mapping[int, Header]) -> Header:
        known = [push for push in pushes if not math.isnan(push.loss)]
        weight = sum(push.samples for push in known)
        wish = Flag.PREEMPT if preempt.requested() else Flag.NONE
        return Header(
            Kind.PUSH,
            sender=self._rank,
            layout=self._replica.layout,
            step=self.clock,
            version=pushes[0].version,
            samples=sum(push.samples for push in full.values()),
            nbytes=self._sum.packet.parts.filled if full else 0,
            loss=sum(push.loss * push.samples for push in known) / weight if weight else math.nan,
            waited=sum(push.waited for push in pushes) / len(pushes),
            flags=functools.reduce(operator.or_, (push.flags for push in pushes), wish),
        )

    def _hand_on(self) -> None:
        """Releases every member with what has come from the server."""
        header = Header.unpack(self._release.header)
        header.sender = self._rank
        self.preempted = bool(header.flags & Flag.PREEMPT)
        self._released = time.monotonic()
        for place in self._active:
            header.pack_into(self._slots[place].release_header)
            self._inner.release(place - 1, self._parts, empty=not header.nbytes)
