"""Tells the servers that only hold a share what rank 0 has decided: in its order, each as a few whole numbers."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stalempi.pipeline.link import Lane, Links, Receiver
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
    END = 8


class Orders:
    """Rank 0's side.

    Args:
        replicas: the shares of the other servers, ranks 1 and up, as this rank's model has them; none: no orders.
        links: reaches those servers.
        timeout: seconds that one of them may take nothing, or send nothing when asked.
    """

    def __init__(self, replicas: Sequence[Replica], links: Links | None = None, timeout: float = 600.0) -> None:
        self._replicas = replicas
        self._senders, self._receivers = [], list[Receiver]()
        for server, replica in enumerate(replicas, start=1):
            assert links is not None
            device = replica.params.storages[0].device
            self._senders.append(links.sender(server, Lane.ORDER, _DEPTH, timeout=timeout))
            self._receivers.append(links.receiver(server, Lane.SHARE, 1, timeout=timeout, device=device))
        self._pending: list[int] = []
        self._sent = self._gathered = 0

    def add(self, order: Order, *workers: int) -> None:
        """Takes an order, to be sent with those after it."""
        if self._senders:
            self._pending += [order, len(workers), *workers]

    def send(self) -> None:
        """Sends what was added; returns at once."""
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
        for replica, receiver in zip(self._replicas, self._receivers, strict=True):
            for mine, theirs in zip(replica.params.storages, receiver.receive((self._gathered, 0)), strict=True):
                mine.copy_(theirs)
        self._gathered += 1

    def close(self) -> None:
        """Returns when all servers have taken their orders."""
        for sender in self._senders:
            sender.flush()
        for receiver in self._receivers:
            receiver.close()


def read_orders(message: Tensor) -> Iterator[tuple[Order, tuple[int, ...]]]:
    """Yields the orders in a message with their workers."""
    numbers = [int(number) for number in message]
    while numbers:
        order, count = Order(numbers[0]), numbers[1]
        yield order, tuple(numbers[2 : 2 + count])
        del numbers[: 2 + count]
