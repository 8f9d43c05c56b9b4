"""Trains a parameter that two blocks have a copy of, so that both copies stay the same, bit for bit.

Both ends gather a gradient of it. The lower block adds the two up and sends the sum back, and each end takes the same
optimizer steps in the same order: a batch's gradient is the sum over both uses, as in plain training. The upper end
takes its steps as many updates later as the lower block is staler, so that it does not wait for a whole round trip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from stalempi.pipeline.actions import Action, Op
from stalempi.pipeline.update import Updater

__all__ = ["TiedEnd"]


class TiedEnd:
    """One end of the parameters that two blocks share.

    Args:
        names: of the parameters in this block, in the order that both ends agree on.
        gathered: gathers their gradients, with all others of this block.
        optimizer: makes their own optimizer.
        is_lower: whether this is the lower of the two blocks.
        lag: updates by which the upper block takes a step later.
    """

    def __init__(
        self,
        names: Sequence[str],
        gathered: Updater,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        is_lower: bool,
        lag: int,
    ) -> None:
        self.is_lower, self._lag, self._names, self._gathered = is_lower, lag, list(names), gathered
        parameters = {name: gathered.parameters[name] for name in names}
        options = replace(gathered.options, loss_scale=1.0)  # it is out already
        self.updater = Updater(parameters, optimizer(parameters.values()), options)
        self._samples: deque[int] = deque()
        self._due: deque[int] = deque()

    def expand(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Yields a block's actions, and before each update what the shared parameters take."""
        for action in actions:
            if action.op is Op.UPDATE:
                yield from self._before(action.batch)
            yield action

    def flush(self) -> Iterator[Action]:
        """Yields the steps that are due once the pipe is empty."""
        while self._due:
            yield from _apply(self._due.popleft())

    def take(self) -> list[Tensor]:
        """Returns this block's own gradients of the shared parameters, means over the samples of the update to come."""
        self._samples.append(self._gathered.pending)
        return self._gathered.take(self._names)

    def step(self, total: Sequence[Tensor]) -> None:
        """Takes one optimizer step with the sum of both blocks' gradients."""
        gradients: dict[str, Tensor | None] = dict(zip(self._names, total, strict=True))
        scaled = self._gathered.options.loss_scale != 1
        if scaled and not all(bool(torch.isfinite(gradient).all()) for gradient in total):
            gradients = dict.fromkeys(self._names)
        self.updater.gather(gradients, self._samples.popleft())
        self.updater.step()

    def _before(self, batch: int) -> Iterator[Action]:
        if self.is_lower:
            yield from (*_apply(batch), Action(Op.SEND_TIE, batch))
            return
        yield Action(Op.SEND_TIE, batch)
        self._due.append(batch)
        if len(self._due) > self._lag:
            yield from _apply(self._due.popleft())


def _apply(batch: int) -> tuple[Action, Action]:
    return Action(Op.RECEIVE_TIE, batch), Action(Op.STEP_TIE, batch)
