"""Clips the gradients that the server is about to apply."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from stalempi.errors import ConfigError

__all__ = ["Clip"]


@dataclass(frozen=True)
class Clip:
    """Limits of a gradient, as torch.nn.utils.clip_grad_value_ and clip_grad_norm_ set them, in this order.

    Attributes:
        norm: largest 2-norm of all gradients together; None: any.
        value: largest magnitude of an element; None: any.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name in ("norm", "value"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError(f"clip_{name}={limit}: give a finite number above 0, or leave it out")

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Clips the gradients of `parameters` in place; those without one are left out."""
        if self.value is not None:
            nn.utils.clip_grad_value_(parameters, self.value)
        if self.norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.norm)
