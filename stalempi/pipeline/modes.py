"""Keeps the mode that each module is in: a user may have some of them, as frozen ones, in evaluation mode for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating", "keeping_modes"]


@contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """Puts every part of a module back into the mode that it was in, whatever is done to it in between."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a module and all its parts in evaluation mode for a while."""
    with keeping_modes(module):
        module.eval()
        yield
