"""Defines the queues between neighbouring blocks, and their twin inside one process.

A link has two directions, each a sender on one block and a receiver on the other. What is promised:

1. Messages arrive in the order in which they were sent, each with the batch (and micro-batch) that it is for.
2. `send` returns at once while fewer than `depth` messages are on their way; a receiver has posted that many receives.
3. What arrives is the caller's own memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from stalempi.errors import ProtocolError, StallError

__all__ = ["Key", "LocalLink", "Receiver", "Sender", "check_key"]

Key = tuple[int, int]
"""A batch (counted over the whole training) and a micro-batch of it."""


class Sender(ABC):
    """The end that hands messages on."""

    @abstractmethod
    def send(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Sends `tensors`, which must not change any more; StallError if the queue stays full until the deadline."""

    @abstractmethod
    def flush(self) -> None:
        """Waits until everything has gone; StallError at the deadline."""


class Receiver(ABC):
    """The end where messages arrive."""

    @abstractmethod
    def ready(self) -> bool:
        """Returns whether a message is there."""

    @abstractmethod
    def receive(self, key: Key) -> tuple[Tensor, ...]:
        """Returns the next message; ProtocolError if it is not for `key`, StallError at the deadline."""


def check_key(got: Key, wanted: Key, peer: str) -> None:
    """Raises ProtocolError if a message is for another batch than the one that is due (DSP's index algebra, Eq. 6)."""
    if got != wanted:
        raise ProtocolError(
            f"got batch {got[0]}.{got[1]} from {peer} where batch {wanted[0]}.{wanted[1]} is due: "
            "every rank must call the same steps, drains and evaluations in the same order"
        )


class LocalLink(Sender, Receiver):
    """Both ends of one direction inside one process.

    Args:
        peer: who sends, in words.
        timeout: seconds that `receive` waits for another thread; 0 in a program of one thread.
    """

    def __init__(self, peer: str, timeout: float = 0.0) -> None:
        self._peer, self._timeout = peer, timeout
        self._queue: deque[tuple[Key, tuple[Tensor, ...]]] = deque()
        self._arrived = threading.Condition()

    def send(self, key: Key, tensors: Sequence[Tensor]) -> None:
        with self._arrived:
            self._queue.append((key, tuple(tensor.clone() for tensor in tensors)))
            self._arrived.notify_all()

    def flush(self) -> None:
        pass

    def ready(self) -> bool:
        return bool(self._queue)

    def receive(self, key: Key) -> tuple[Tensor, ...]:
        with self._arrived:
            if not self._arrived.wait_for(lambda: bool(self._queue), self._timeout):
                raise StallError(f"nothing came from {self._peer} within {self._timeout:g} s")
            got, tensors = self._queue.popleft()
        check_key(got, key, self._peer)
        return tensors
