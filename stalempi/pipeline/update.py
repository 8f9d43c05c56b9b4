"""Gathers a block's gradients and takes its optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError

__all__ = ["UpdateOptions", "Updater"]


@dataclass(frozen=True)
class UpdateOptions:
    """How a block is updated.

    Attributes:
        clip_norm, clip_value: limits of this block's gradient; the norm is the block's own, not the whole model's.
        loss_scale: factor of the loss while error gradients travel, taken out before an update, for float16; an update
            whose gradients overflow is then left out, and counted.
        schedule: factor of the block's learning rate as a function of global samples.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    loss_scale: float = 1.0
    schedule: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        for name in ("clip_norm", "clip_value", "loss_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, got {value:g}")


class Updater:
    """What one block's gradients go into.

    Args:
        module: the block.
        optimizer: of its parameters; None if it has none.
        options: see `UpdateOptions`.
        agree: called as agree(gradients, samples): makes gradients their mean over the block's replicas, in place, and
            returns the samples of all; None if there is one.

    Attributes:
        parameters: those trained, by name.
        updates: made so far.
        samples: that they stood for.
        skipped: updates left out because their gradients overflowed.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: UpdateOptions | None = None,
        *,
        agree: Callable[[list[Tensor], int], int] | None = None,
    ) -> None:
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer, self.options, self._agree = optimizer, options or UpdateOptions(), agree
        self.updates = self.samples = self.skipped = 0
        self._rates = [group["lr"] for group in optimizer.param_groups] if optimizer else []
        self._begin()

    def _begin(self) -> None:
        self._first = self._pending = 0
        self._weight = 0.0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss as its gradients travel."""
        return loss * self.options.loss_scale if self.options.loss_scale != 1 else loss

    def gather(self, gradients: Mapping[str, Tensor | None], samples: int) -> None:
        """Adds gradients, means over `samples` samples, to what the next step takes.

        Args:
            gradients: by the name of the parameter; None where a batch did not use it.
            samples: that they are the mean of: a batch's, or a micro-batch's.
        """
        self._first = self._first or samples
        factor = samples / self._first
        self._pending += samples
        self._weight += factor
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            parameter = self.parameters[name]
            # memory of its own: autograd may hand out one tensor twice, or one number spread
            scaled = gradient * factor
            parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)

    def step(self) -> None:
        """Takes one optimizer step with the mean of what was gathered, each sample counted once."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        divisor = self.options.loss_scale * (self._weight or 1.0)
        if divisor != 1:
            for gradient in gradients:
                gradient.div_(divisor)
        if self._agree:
            self._pending = self._agree(gradients, self._pending)
        self.samples += self._pending
        self.updates += 1
        if self.options.loss_scale != 1 and not all(bool(torch.isfinite(g).all()) for g in gradients):
            self.skipped += 1
        elif self.optimizer:
            self._clip()
            self._set_rates(self.optimizer)
            self.optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        self._begin()

    def _clip(self) -> None:
        if self.options.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.options.clip_norm)
        if self.options.clip_value is not None:
            nn.utils.clip_grad_value_(self.parameters.values(), self.options.clip_value)

    def _set_rates(self, optimizer: torch.optim.Optimizer) -> None:
        if self.options.schedule:
            factor = self.options.schedule(self.samples - self._pending)
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
