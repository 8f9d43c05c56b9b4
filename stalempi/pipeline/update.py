"""Gathers a block's gradients and takes its optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError

__all__ = ["UpdateOptions", "Updater", "trained"]


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


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a module that take gradients, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class Updater:
    """What one block's gradients go into.

    Args:
        parameters: those trained, by name.
        optimizer: of those that it steps; None if there are none.
        options: see `UpdateOptions`.
        agree: called as agree(gradients, samples): makes gradients their mean over the block's replicas, in place, and
            returns the samples of all; None if there is one.

    Attributes:
        updates: made so far.
        samples: that they stood for.
        pending: samples gathered since the last step.
        skipped: updates left out because their gradients overflowed.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        options: UpdateOptions | None = None,
        *,
        agree: Callable[[list[Tensor], int], int] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizer, self.options, self._agree = optimizer, options or UpdateOptions(), agree
        self.updates = self.samples = self.skipped = 0
        self._rates = [group["lr"] for group in optimizer.param_groups] if optimizer else []
        self._begin()

    def _begin(self) -> None:
        self._first = self.pending = 0
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
        self.pending += samples
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
        for gradient in gradients:
            self._to_mean(gradient)
        if self._agree:
            self.pending = self._agree(gradients, self.pending)
        self.samples += self.pending
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

    def take(self, names: Iterable[str]) -> list[Tensor]:
        """Returns the means of some parameters' gradients, which the next step then does without."""
        taken = []
        for name in names:
            parameter = self.parameters[name]
            gradient, parameter.grad = parameter.grad, None
            taken.append(torch.zeros_like(parameter) if gradient is None else self._to_mean(gradient.to_dense()))
        return taken

    def _to_mean(self, gradient: Tensor) -> Tensor:
        divisor = self.options.loss_scale * (self._weight or 1.0)
        return gradient.div_(divisor) if divisor != 1 else gradient

    def _clip(self) -> None:
        if self.options.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.options.clip_norm)
        if self.options.clip_value is not None:
            nn.utils.clip_grad_value_(self.parameters.values(), self.options.clip_value)

    def _set_rates(self, optimizer: torch.optim.Optimizer) -> None:
        if self.options.schedule:
            factor = self.options.schedule(self.samples - self.pending)
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
