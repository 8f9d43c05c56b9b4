"""Defines the queues between neighbouring blocks, and their twin inside one process.

A link has two directions, each a sender on one block and a receiver on the other. What is promised:

1. Messages arrive in the order in which they were sent, each with the batch (and micro-batch) that it is for.
2. `send` returns at once while fewer than `depth` messages are on their way; a receiver has posted that many receives.
3. What arrives is the caller's own memory.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from stalempi.errors import ProtocolError, StallError

__all__ = ["MAX_TENSORS", "Key", "Lane", "Links", "LocalLink", "Note", "Receiver", "Sender", "check_key"]

MAX_TENSORS = 7
"""Tensors that one message can carry."""

Key = tuple[int, int]
"""A batch (counted over the whole training) and a micro-batch of it."""


class Lane(enum.IntEnum):
    """Queues between two ranks, each with its own order."""

    ACTIVATION = 0
    GRADIENT = 1
    LABEL = 2
    REPLICA = 3
    TIE = 4
    STATE = 5
    START = 6
    EVALUATION = 7
    STOP = 8  # to the first block: a signal asked this rank to stop
    ORDER = 9  # from the server that decides to the others
    SHARE = 10  # and back: the parameters that they hold

    @property
    def any_size(self) -> bool:
        """Whether messages may be of any size, one receive at a time; else the first settles the size of the rest."""
        return self in (Lane.STATE, Lane.START, Lane.EVALUATION, Lane.STOP, Lane.ORDER, Lane.SHARE)


class Note(enum.IntEnum):
    """What a batch tells the blocks that it comes to."""

    NONE = 0
    PAUSE = 1  # empty the pipe after this batch
    STOP = 2  # no later batch will come


class Sender(ABC):
    """The end that hands messages on."""

    @abstractmethod
    def send(self, key: Key, tensors: Sequence[Tensor], *, note: Note = Note.NONE) -> None:
        """Sends `tensors`, which must not change any more; StallError if the queue stays full until the deadline."""

    @abstractmethod
    def flush(self) -> None:
        """Waits until everything has gone; StallError at the deadline. No close is needed after it."""


class Receiver(ABC):
    """The end where messages arrive.

    Attributes:
        note: what the message received last said besides.
    """

    note: Note = Note.NONE

    @abstractmethod
    def ready(self) -> bool:
        """Returns whether a message is there."""

    @abstractmethod
    def receive(self, key: Key) -> tuple[Tensor, ...]:
        """Returns the next message; ProtocolError if it is not for `key`, StallError at the deadline."""

    @abstractmethod
    def close(self) -> None:
        """Takes back what was posted for messages that will not come."""


class Links(ABC):
    """Makes the queues between this rank and others."""

    @abstractmethod
    def sender(self, rank: int, lane: Lane, depth: int, *, timeout: float) -> Sender:
        """Opens the sending end of a queue to `rank` in which `depth` messages may be on their way."""

    @abstractmethod
    def receiver(self, rank: int, lane: Lane, depth: int, *, timeout: float, device: torch.device) -> Receiver:
        """Opens the receiving end of a queue from `rank`; what arrives is put on `device`."""

    @abstractmethod
    def progress(self) -> AbstractContextManager[None]:
        """Keeps messages moving while this rank computes, until the end of the block."""


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
        self._peer, self.timeout = peer, timeout
        self._queue: deque[tuple[Key, tuple[Tensor, ...], Note]] = deque()
        self._arrived = threading.Condition()

    def send(self, key: Key, tensors: Sequence[Tensor], *, note: Note = Note.NONE) -> None:
        with self._arrived:
            self._queue.append((key, tuple(tensor.clone() for tensor in tensors), note))
            self._arrived.notify_all()

    def flush(self) -> None:
        pass

    def ready(self) -> bool:
        return bool(self._queue)

    def close(self) -> None:
        pass

    def receive(self, key: Key) -> tuple[Tensor, ...]:
        with self._arrived:
            if not self._arrived.wait_for(lambda: bool(self._queue), self.timeout):
                raise StallError(f"nothing came from {self._peer} within {self.timeout:g} s")
            got, tensors, self.note = self._queue.popleft()
        check_key(got, key, self._peer)
        return tensors
