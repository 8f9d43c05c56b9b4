"""Methods, small blocks, their data and plain training, for tests of pipelines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from stalempi.pipeline.schedules import (
    BP,
    DDG,
    DNI,
    DSP,
    FR,
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    Schedule,
    TwoBW,
)
from stalempi.pipeline.sizing import uniform_queues
from tests.small import largest_difference

__all__ = [
    "adam",
    "batches",
    "difference",
    "loss_of",
    "make_blocks",
    "methods",
    "momentum",
    "plain_run",
    "sgd",
    "uniform",
]


def uniform(blocks: int, p: int, q: int, *, overlaps: bool = True, accumulate: int = 1) -> DSP:
    """Returns the DSP with p outputs and q error gradients on every link."""
    return replace(uniform_queues(blocks, p, q, overlaps=overlaps), accumulate=accumulate)


def methods(blocks: int) -> list[Schedule]:
    """Returns every method, with and without its options."""
    return [
        BP(),
        BP(3),
        GPipe(1),
        GPipe(4),
        OneForwardOneBackward(1),
        OneForwardOneBackward(3),
        OneForwardOneBackward(6),
        PipeDream(),
        PipeDream(2),
        TwoBW(blocks),
        TwoBW(blocks + 2),
        DDG(),
        DDG(3),
        FR(),
        FR(overlaps=False),
        FR(accumulate=2),
        DNI(),
        uniform(blocks, 0, 0),
        uniform(blocks, 0, 1),
        uniform(blocks, 1, 0),
        uniform(blocks, 1, 1),
        uniform(blocks, 2, 1, overlaps=False),
        uniform(blocks, 1, 2, accumulate=3),
    ]


def make_blocks(blocks: int, *, norm: bool = False, seed: int = 3) -> list[nn.Module]:
    """Returns a small net of 4 inputs and 3 classes, cut into blocks, the same for the same seed."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for k in range(blocks):
        wide = 4 if k == 0 else 6
        layer = nn.Linear(wide, 3 if k == blocks - 1 else 6)
        if k == blocks - 1:
            layers.append(nn.Sequential(layer))
        else:
            layers.append(nn.Sequential(layer, *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh()))
    return layers


def batches(count: int, size: int = 8, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Returns `count` batches of points in 4 dimensions and their classes."""
    draws = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=draws), torch.randint(3, (size,), generator=draws)) for _ in range(count)]


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross entropy."""
    return nn.functional.cross_entropy(output, labels)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns plain SGD."""
    return torch.optim.SGD(parameters, lr=0.2)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns Adam."""
    return torch.optim.Adam(parameters, lr=0.02)


def plain_run(
    modules: Sequence[nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    data: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[..., Tensor] = loss_of,
) -> nn.Sequential:
    """Trains a copy of the blocks as one ordinary model, and returns it."""
    model = nn.Sequential(*copy.deepcopy(list(modules))).train()
    optim = optimizer(model.parameters())
    for x, y in data:
        optim.zero_grad()
        loss(model(x), y).backward()
        optim.step()
    return model


def difference(a: Iterable[nn.Module], b: Iterable[nn.Module]) -> float:
    """Returns the largest difference between the states of two nets, cut alike; 0 if they are equal bit for bit."""
    return largest_difference(nn.Sequential(*a), nn.Sequential(*b))
