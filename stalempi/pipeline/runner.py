"""Carries out a block's stream of actions: one loop for every method, over MPI and in one process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from stalempi.errors import ConfigError
from stalempi.pipeline.actions import Action, Op
from stalempi.pipeline.block import Block, Tensors
from stalempi.pipeline.dryrun import Done
from stalempi.pipeline.link import Key, Receiver, Sender
from stalempi.pipeline.predictor import Predictor
from stalempi.pipeline.schedules import Schedule
from stalempi.pipeline.tied import TiedEnd

__all__ = ["Neighbour", "Runner", "Stretch"]

Stretch = Callable[[Op, int, float], None]
"""Called as stretch(op, batch, began) once a computation is done; may sleep to make it longer."""


@dataclass(frozen=True)
class Neighbour:
    """The link to the block below or above, as this block sees it."""

    sends: Sender
    receives: Receiver


class Runner:
    """One block at work.

    Args:
        block: what computes.
        schedule: says what comes next.
        below, above: the links to its neighbours; None at the ends.
        labels, labels_out: the two ends of what carries labels from the first block to the last, if they are sent.
        tied: what trains parameters that this block shares with another one, and the link to that one.
        predictor: for DNI, on every block but the last.
        stretch: makes computations longer, for experiments.
        record: called with every action that is done, its times in seconds of `time.perf_counter`.
        progress: keeps messages moving during a computation.

    Attributes:
        batches: taken in so far.
        waited: seconds spent in waiting for messages.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        block: Block,
        schedule: Schedule,
        *,
        below: Neighbour | None = None,
        above: Neighbour | None = None,
        labels: Receiver | None = None,
        labels_out: Sender | None = None,
        tied: tuple[TiedEnd, Neighbour] | None = None,
        predictor: Predictor | None = None,
        stretch: Stretch | None = None,
        record: Callable[[Done], None] | None = None,
        progress: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        schedule.check(block.blocks)
        assert (below is None) == block.is_first, "only the first block has none below"
        assert (above is None) == block.is_last, "only the last block has none above"
        self.block, self.schedule, self.predictor = block, schedule, predictor
        self._below, self._above = below, above
        self._labels, self._labels_out = labels, labels_out
        self._tied: TiedEnd | None = tied[0] if tied else None
        self._other: Neighbour | None = tied[1] if tied else None
        self._stretch, self._record, self._progress = stretch, record, progress
        self.batches = 0
        self.waited = 0.0
        self._base = 0  # batches before the pipe was drained last: the schedule counts from there
        self._todo: deque[Action] = deque()
        self._here: dict[tuple[str, Key], Tensors] = {}
        self._work = {
            Op.FORWARD: self._forward,
            Op.RECOMPUTE: self._recompute,
            Op.BACKWARD: self._backward,
            Op.UPDATE: self._update,
            Op.PREDICT: self._predict,
            Op.TRAIN: self._train,
            Op.RECEIVE_ACTIVATION: self._receive_activation,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECEIVE_GRADIENT: self._receive_gradient,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.STEP_TIE: self._step_tie,
            Op.RECEIVE_TIE: self._receive_tie,
            Op.SEND_TIE: self._send_tie,
        }

    def add_step(self, x: Sequence[Tensor] | None, y: Sequence[Tensor] | None) -> None:
        """Adds the actions of one step to what is to be done.

        Args:
            x: the batch, on the first block.
            y: its labels, on the last block, or on the first if they are sent.
        """
        if self.block.is_first:
            assert x is not None, "the first block takes the data in"
            self._place("input", x)
        if y is not None:
            self._place("label", y)
            self._send_labels()
        actions: Iterable[Action] = self.schedule.step(self.block.number, self.block.blocks, self.batches - self._base)
        self._todo.extend(self._tied.expand(actions) if self._tied else actions)
        self.batches += 1

    def add_drain(self) -> None:
        """Adds what finishes the batches that are inside."""
        actions: Iterable[Action] = self.schedule.drain(self.block.number, self.block.blocks, self.batches - self._base)
        self._todo.extend(self._tied.expand(actions) if self._tied else actions)
        self._todo.extend(self._tied.flush() if self._tied else ())

    def advance(self, *, wait: bool = True) -> bool:
        """Does what is to be done, without `wait` only up to a message that is missing; returns whether it did any."""
        moved = False
        while self._todo and (wait or not self._todo[0].op.is_receive or self._is_there(self._todo[0])):
            self._do(self._todo.popleft())
            moved = True
        return moved

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done."""
        return not self._todo

    def restart(self, batches: int | None = None) -> None:
        """Begins a new stream once the pipe is empty; `batches` says how many it has seen, for a run that goes on."""
        assert self.idle, "drained before"
        self.batches = self.batches if batches is None else batches
        self._base = self.batches
        self.block.weights.restart(self.block.updater.updates)

    def close(self) -> None:
        """Takes back what was posted for messages of later batches."""
        for neighbour in (self._below, self._above, self._other):
            if neighbour:
                neighbour.sends.flush()
                neighbour.receives.close()
        if self._labels_out:
            self._labels_out.flush()
        if self._labels:
            self._labels.close()

    def _place(self, what: str, tensors: Sequence[Tensor]) -> None:
        parts = self.schedule.micro_batches
        samples = {len(tensor) for tensor in tensors}
        if len(samples) != 1 or min(samples) < parts:
            sizes = ", ".join(map(str, sorted(samples)))
            raise ConfigError(
                f"a batch of {sizes} sample(s) cannot be cut into {parts} micro-batch(es): take larger ones"
            )
        split = [torch.tensor_split(tensor, parts) for tensor in tensors]
        for micro in range(parts):
            # copies, for a batch stays inside while the user may fill the same memory anew
            self._here[what, (self.batches, micro)] = tuple(pieces[micro].clone() for pieces in split)

    def _send_labels(self) -> None:
        for micro in range(self.schedule.micro_batches if self._labels_out else 0):
            assert self._labels_out is not None, "a block to send to"
            key = self.batches, micro
            self._labels_out.send(key, self._here.pop(("label", key)))

    def _key(self, action: Action) -> Key:
        return self._base + action.batch, action.micro or 0

    def _is_there(self, action: Action) -> bool:
        up, tie = action.op is Op.RECEIVE_ACTIVATION, action.op is Op.RECEIVE_TIE
        neighbour = self._other if tie else self._below if up else self._above
        assert neighbour is not None, "a neighbour to receive from"
        return neighbour.receives.ready()

    def _do(self, action: Action) -> None:
        began = time.perf_counter()
        if action.op.is_send or action.op.is_receive:
            self._work[action.op](self._key(action))
        else:
            with self._progress():
                self._work[action.op](self._key(action))
                if self._stretch and action.op is not Op.RECOMPUTE:
                    self._stretch(action.op, self._base + action.batch, began)
        ended = time.perf_counter()
        if action.op.is_receive:
            self.waited += ended - began
        if self._record:
            batch = self._base + action.batch
            self._record(Done(self.block.number, Action(action.op, batch, action.micro), began, ended))

    def _receive_activation(self, key: Key) -> None:
        assert self._below is not None, "a block below"
        self._here["input", key] = self._below.receives.receive(key)

    def _forward(self, key: Key) -> None:
        if self._labels:
            self._here["label", key] = self._labels.receive(key)
        outputs = self.block.forward(key, self._here.pop(("input", key)))
        if not self.block.is_last:
            self._here["output", key] = outputs

    def _send_activation(self, key: Key) -> None:
        assert self._above is not None, "a block above"
        outputs = self._here["output", key] if self.schedule.predicts else self._here.pop(("output", key))
        self._above.sends.send(key, outputs)

    def _recompute(self, key: Key) -> None:
        began = time.perf_counter()
        stretch = self._stretch
        self.block.recompute(key, (lambda: stretch(Op.RECOMPUTE, key[0], began)) if stretch else None)

    def _receive_gradient(self, key: Key) -> None:
        assert self._above is not None, "a block above"
        self._here["teach" if self.schedule.predicts else "gradient", key] = self._above.receives.receive(key)

    def _backward(self, key: Key) -> None:
        below = self.block.backward(key, self._here.pop(("label" if self.block.is_last else "gradient", key)))
        if not self.block.is_first:
            self._here["below", key] = below

    def _send_gradient(self, key: Key) -> None:
        assert self._below is not None, "a block below"
        self._below.sends.send(key, self._here.pop(("below", key)))

    def _update(self, key: Key) -> None:
        del key
        self.block.update()

    def _receive_tie(self, key: Key) -> None:
        assert self._other is not None, "another block to share with"
        self._here["tie", key] = self._other.receives.receive(key)

    def _step_tie(self, key: Key) -> None:
        assert self._tied is not None, "parameters to share"
        total = self._here.pop(("tie", key))
        if self._tied.is_lower:
            total = tuple(own + other for own, other in zip(self._tied.take(), total, strict=True))
            self._here["total", key] = total
        self._tied.step(total)

    def _send_tie(self, key: Key) -> None:
        assert self._tied is not None, "parameters to share"
        assert self._other is not None, "another block to share with"
        self._other.sends.send(key, self._here.pop(("total", key)) if self._tied.is_lower else self._tied.take())

    def _predict(self, key: Key) -> None:
        outputs = self._here.pop(("output", key))
        if self.predictor is None or len(outputs) != 1:
            raise ConfigError(
                f"dni predicts one error gradient a block, but block {self.block.number} has {len(outputs)}"
            )
        self._here["gradient", key] = (self.predictor.predict(outputs[0]),)

    def _train(self, key: Key) -> None:
        assert self.predictor is not None, "a prediction comes first"
        self.predictor.train(*self._here.pop(("teach", key)))
