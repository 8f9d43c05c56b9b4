"""A small model, its optimizers and its data, for tests that train it and compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["data", "fill", "largest_difference", "make_model", "momentum", "plain", "step"]


def make_model() -> nn.Module:
    """Returns a model of two layers, the same each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Returns SGD with momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    """Returns SGD by whose step a parameter loses half its gradient."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


def data(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns `size` points in 4 dimensions and their classes, a function of the seed."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=draws), torch.randint(2, (size,), generator=draws)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Takes one ordinary training step."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def fill(model: nn.Module, value: float) -> None:
    """Sets every gradient to `value`, as a user may."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """Returns the largest difference between two state_dicts."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((p - q).abs().max()) for p, q in pairs)
