"""Computes the gradients of one worker of the command: precision, scaling, several batches to a push."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor, nn

from stalempi.train.loss import cross_entropy
from stalempi.train.optimizer import DistributedOptimizer

__all__ = ["Stepper", "grouped"]

T = TypeVar("T")
_PRECISIONS = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def grouped(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields lists of `size` items, the last one of what is left."""
    run = iter(items)
    while found := list(islice(run, size)):
        yield found


class Stepper:
    """Takes the steps of a worker.

    Args:
        model, optimizer: what is trained, on `device`.
        amp: "off", "bf16" (autocast) or "fp16" (autocast with a gradient scaler).
    """

    def __init__(self, model: nn.Module, optimizer: DistributedOptimizer, amp: str, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._autocast = torch.autocast(device.type, _PRECISIONS[amp], enabled=amp != "off")
        self._scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
        self._samples, self._loss = 0, 0.0

    def compute(self, batches: Sequence[tuple[Tensor, Tensor]]) -> int:
        """Computes the gradient of the mean loss over all `batches` together; returns their samples."""
        self._optimizer.zero_grad()
        self._samples, self._loss = sum(len(x) for x, _ in batches), 0.0
        for x, y in batches:
            with self._autocast:
                loss = cross_entropy(self._model(x.to(self._device)), y.to(self._device))
            share = loss * (len(x) / self._samples) if len(batches) > 1 else loss
            torch.autograd.backward(self._scaler.scale(share) if self._scaler else share)
            self._loss += float(share.detach())
        return self._samples

    def push(self) -> None:
        """Takes the step."""
        if self._scaler is None:
            self._optimizer.step(samples=self._samples, loss=self._loss)
            return
        self._scaler.step(self._optimizer, samples=self._samples, loss=self._loss)
        self._scaler.update()
