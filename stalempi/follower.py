"""Serves a share of the parameters: does what rank 0 has decided, in its order; knows no MPI."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch

from stalempi.correction import Correction
from stalempi.errors import StallError
from stalempi.holder import Holder, ServerOptions
from stalempi.orders import Order, read_orders
from stalempi.parcels import receive_value, send_value
from stalempi.pipeline.link import Lane, Links
from stalempi.replica import Replica
from stalempi.silence import CHECK_EVERY
from stalempi.stats import RunStats
from stalempi.transport.backoff import wait_for
from stalempi.transport.base import Transport
from stalempi.transport.message import Header

__all__ = ["Follower"]


class Follower(Holder):
    """A server besides rank 0.

    It asks no policy: each worker sends it the same clock, samples and flags as rank 0, and rank 0 says what becomes of
    them. So its share goes through the very updates that it would have gone through in rank 0's memory.

    Args:
        replica: its share.
        transport, links: reach workers and rank 0.
        options, correction: as rank 0 has them.
    """

    def __init__(
        self,
        replica: Replica,
        transport: Transport,
        links: Links,
        *,
        options: ServerOptions,
        correction: Correction | None = None,
    ) -> None:
        super().__init__(replica, transport, options=replace(options, note_bytes=0), correction=correction)
        timeout = options.stall_timeout
        self._links_in = links.receiver(0, Lane.ORDER, 1, timeout=timeout, device=torch.device("cpu"))
        self._links_out = links.sender(0, Lane.SHARE, 1, timeout=timeout)
        self._state_in = links.receiver(0, Lane.STATE, 1, timeout=timeout, device=torch.device("cpu"))
        self._state_out = links.sender(0, Lane.STATE, 1, timeout=timeout)
        self._orders: deque[tuple[Order, tuple[int, ...]]] = deque()
        self._arrived: set[int] = set()  # workers whose message is here and not taken
        self._heard = self._gathered = self._saved = 0
        self._over = False

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of this server besides its parameters, by parts."""
        return {
            "optimizer": self.replica.optimizer.state_dict()["state"],
            "correction": self._correction.state() if self._correction else None,
        }

    def take_over(self) -> None:
        """Goes on from what rank 0 has found in a checkpoint and sends."""
        known, optimizer = receive_value(self._state_in, 0), self.replica.optimizer
        optimizer.load_state_dict({"state": known["optimizer"], "param_groups": optimizer.state_dict()["param_groups"]})
        self.stats.updates, self.stats.samples = known["updates"], known["samples"]
        for slot, stats, iterations in zip(self._slots, self.stats.workers, known["iterations"], strict=True):
            slot.version, slot.step = self.stats.updates, iterations
            stats.iterations = iterations
        if self._correction and known["correction"]:
            self._correction.load_state(known["correction"])

    def serve(self) -> RunStats:
        """Serves until rank 0 says that all workers have left.

        Raises StallError if a message that rank 0 has got does not come here, or if rank 0 is silent for twice as long
        as a worker may be, of which it would have told.
        """
        since, was_due = self.options.now(), False
        while not self._over:
            if wait_for(self._go_on, CHECK_EVERY, lambda: bool(self._arrived)) or was_due != bool(self._orders):
                since, was_due = self.options.now(), bool(self._orders)
            self._check(self.options.now() - since)
        self._end.close(self.options.stall_timeout)
        self._links_out.flush()
        self._links_in.close()
        self._state_in.close()
        return self.stats

    def _check(self, silent: float) -> None:
        limit = self.options.stall_timeout * (1 if self._orders else 2)
        if silent <= limit:
            return
        if not self._orders:
            raise StallError(f"server {self._rank}: nothing from rank 0 in {limit:g} s: it is stuck or gone")
        rank = self._ranks[self._orders[0][1][0]]
        raise StallError(
            f"server {self._rank}: rank 0 has a push of rank {rank} whose part for this server did not come in "
            f"{limit:g} s"
        )

    def _go_on(self) -> bool:
        """Does what can be done now; returns whether that was anything."""
        self._arrived.update(self._end.receive(0.0))
        while self._links_in.ready():
            (message,) = self._links_in.receive((self._heard, 0))
            self._heard += 1
            self._orders.extend(read_orders(message))
        done = 0
        while self._orders and self._may(*self._orders[0]):
            self._do(*self._orders.popleft())
            done += 1
        return done > 0

    def _may(self, order: Order, workers: tuple[int, ...]) -> bool:
        return order not in (Order.TAKE, Order.SKIP) or workers[0] in self._arrived

    def _released_next(self) -> list[int]:
        """Takes the releases that are the next orders; returns their workers."""
        released = []
        while self._orders and self._orders[0][0] is Order.RELEASE:
            released.append(self._orders.popleft()[1][0])
        return released

    def _do(self, order: Order, workers: tuple[int, ...]) -> None:
        match order:
            case Order.TAKE | Order.SKIP:
                self._arrived.remove(workers[0])
                slot = self._slots[workers[0]]
                header = Header.unpack(slot.packet.header)
                slot.step = header.step
                if order is Order.TAKE:
                    self.take(workers[0], header)
            case Order.APPLY:
                self.apply(workers, self._released_next())
            case Order.DROP:
                self.drop(workers[0])
            case Order.RELEASE | Order.CONTINUE:
                self.release(workers[0], empty=order is Order.CONTINUE)
            case Order.DRAIN:
                self.draining = True
            case Order.GATHER:
                nbytes = torch.tensor([worker.bytes_pushed for worker in self.stats.workers])
                self._links_out.send((self._gathered, 0), [nbytes, *self.replica.params.storages])
                self._links_out.flush()
                self._gathered += 1
            case Order.SAVE:
                send_value(self._state_out, self._saved, self.state())
                self._saved += 1
            case Order.END:
                self._over = True
