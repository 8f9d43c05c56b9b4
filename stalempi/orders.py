"""Tells the servers that only hold a share what rank 0 has decided: in its order, each as a few whole numbers."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stalempi.parcels import receive_value, send_value
from stalempi.pipeline.link import Lane, Links, Receiver, Sender
from stalempi.policy.base import Apply, Continue, Decision, Drop, Release
from stalempi.replica import Replica

__all__ = ["Order", "Orders", "read_orders"]

# Orders that may be on their way to one server; rank 0 then waits for it.
_DEPTH = 256


class Order(enum.IntEnum):
    """What to do; workers are its arguments."""

    TAKE = 0  # what this worker sent, which may still have to come
    SKIP = 1  # likewise, but it is not to be applied
    APPLY = 2
    DROP = 3
    RELEASE = 4
    CONTINUE = 5
    DRAIN = 6
    GATHER = 7  # send your share to rank 0
    SAVE = 8  # and what a checkpoint keeps besides
    END = 9


_OF: dict[type[Drop] | type[Release] | type[Continue], Order] = {
    Drop: Order.DROP,
    Release: Order.RELEASE,
    Continue: Order.CONTINUE,
}


class Orders:
    """Rank 0's side.

    Args:
        replicas: the shares of the other servers, ranks 1 and up, as this rank's model has them; none: no orders.
        num_workers: that push to them.
        links: reaches those servers.
        timeout: seconds that one of them may take nothing, or send nothing when asked.

    Attributes:
        bytes_pushed: of each worker to the other servers, as of the last `gather`.
    """

    def __init__(
        self, replicas: Sequence[Replica], num_workers: int, links: Links | None = None, timeout: float = 600.0
    ) -> None:
        self._replicas = replicas
        self._senders, self._receivers, self._states = [], list[Receiver](), list[tuple[Sender, Receiver]]()
        for server, replica in enumerate(replicas, start=1):
            assert links is not None
            device = replica.params.storages[0].device
            self._senders.append(links.sender(server, Lane.ORDER, _DEPTH, timeout=timeout))
            self._receivers.append(links.receiver(server, Lane.SHARE, 1, timeout=timeout, device=device))
            states = links.receiver(server, Lane.STATE, 1, timeout=timeout, device=torch.device("cpu"))
            self._states.append((links.sender(server, Lane.STATE, 1, timeout=timeout), states))
        self._pending: list[int] = []
        self._sent = self._gathered = self._saved = 0
        self.bytes_pushed = [0] * num_workers

    def add(self, order: Order, *workers: int) -> None:
        """Takes an order, to be sent with those after it."""
        if self._senders:
            self._pending += [order, len(workers), *workers]

    def add_decision(self, decision: Decision) -> None:
        """Takes what the policy has decided."""
        if isinstance(decision, Apply):
            self.add(Order.APPLY, *decision.workers)
        else:
            self.add(_OF[type(decision)], decision.worker)

    def send(self) -> None:
        """Sends what was added; returns at once, unless a server leaves too many untaken: then StallError in time."""
        if not self._pending:
            return
        message = torch.tensor(self._pending, dtype=torch.int64)
        self._pending = []
        for sender in self._senders:
            sender.send((self._sent, 0), [message])
        self._sent += 1

    def gather(self) -> None:
        """Has every share sent to this rank's model, as the orders so far leave it; returns when they are here."""
        self.add(Order.GATHER)
        self.send()
        self.bytes_pushed = [0] * len(self.bytes_pushed)
        for replica, receiver in zip(self._replicas, self._receivers, strict=True):
            nbytes, *values = receiver.receive((self._gathered, 0))
            for mine, theirs in zip(replica.params.storages, values, strict=True):
                mine.copy_(theirs)
            self.bytes_pushed = [a + b for a, b in zip(self.bytes_pushed, nbytes.tolist(), strict=True)]
        self._gathered += 1

    def collect(self) -> list[dict[str, Any]]:
        """Gathers, and returns each other server's `Follower.state`, as the orders so far leave it."""
        self.gather()
        self.add(Order.SAVE)
        self.send()
        found = [receive_value(receiver, self._saved) for _, receiver in self._states]
        self._saved += 1
        return found

    def hand_out(self, states: Sequence[dict[str, Any]]) -> None:
        """Gives each other server what it goes on from, before any order; see `Follower.take_over`."""
        for (sender, _), state in zip(self._states, states, strict=True):
            send_value(sender, 0, state)

    @property
    def replicas(self) -> Sequence[Replica]:
        """The shares of the other servers."""
        return self._replicas

    def end(self) -> None:
        """Says that all workers have left; returns when all servers have taken that."""
        self.add(Order.END)
        self.send()
        for sender in self._senders:
            sender.flush()
        for receiver in [*self._receivers, *(receiver for _, receiver in self._states)]:
            receiver.close()


def read_orders(message: Tensor) -> Iterator[tuple[Order, tuple[int, ...]]]:
    """Yields the orders in a message with their workers."""
    numbers = [int(number) for number in message]
    while numbers:
        order, count = Order(numbers[0]), numbers[1]
        yield order, tuple(numbers[2 : 2 + count])
        del numbers[: 2 + count]
