"""Counts the samples that go through a model, so that a step knows what its gradient stands for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SampleCount", "count_samples"]


class SampleCount:
    """Samples seen since they were last taken."""

    def __init__(self) -> None:
        self._seen = 0

    def add(self, samples: int) -> None:
        """Counts `samples` more."""
        self._seen += samples

    @property
    def seen(self) -> int:
        """Samples since they were last taken."""
        return self._seen

    def take(self) -> int:
        """Returns the count and begins at 0 again."""
        seen, self._seen = self._seen, 0
        return seen


def count_samples(model: nn.Module) -> SampleCount:
    """Counts, from now on, the first dimension of the first tensor given to each training forward of `model`."""
    count = SampleCount()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim())
            count.add(next((len(value) for value in given), 0))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return count
