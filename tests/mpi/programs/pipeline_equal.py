"""Trains a small net by every method over MPI, and again in one process; prints what differs, which must be nothing."""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor, nn

import stalempi
from stalempi.pipeline.actions import Op
from stalempi.pipeline.reference import Reference
from stalempi.pipeline.split import split

torch.set_num_threads(1)
context = stalempi.init(pipeline=True)
torch.set_num_threads(1)
BLOCKS = context.size
CUTS = {1: (), 2: (5,), 3: (2, 6), 4: (2, 5, 9)}[BLOCKS]
draw = random.Random(context.rank)


def net(*, dropout: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate([(8, 16), (16, 16), (16, 16), (16, 4)]):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)]
        layers += [nn.Dropout(0.3)] if dropout and place == 1 else []
        layers += [nn.ReLU(inplace=True)] if place < 3 else []
    return nn.Sequential(*layers)


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


def straggle(op: Op, batch: int, began: float) -> None:
    del op, batch, began
    if draw.random() < 0.1:
        time.sleep(0.005)


def batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 8, generator=draws), torch.randint(0, 4, (8,), generator=draws)) for _ in range(count)]


def methods() -> list[stalempi.Schedule]:
    p = tuple(1 if k < BLOCKS - 1 else 0 for k in range(BLOCKS))
    m = tuple(2 * (BLOCKS - 1 - k) for k in range(BLOCKS))
    named: list[stalempi.Schedule] = [stalempi.BP(), stalempi.GPipe(4), stalempi.OneForwardOneBackward(4)]
    named += [
        stalempi.PipeDream(),
        stalempi.TwoBW(4),
        stalempi.DDG(),
        stalempi.FR(),
        stalempi.DNI(),
        stalempi.DSP(p, m),
    ]
    published = {3: [((1, 1, 0), (4, 2, 0)), ((2, 2, 0), (6, 3, 0)), ((5, 5, 0), (14, 7, 0))]}
    return named + [stalempi.DSP(p, m) for p, m in published.get(BLOCKS, [])] + [stalempi.FR(overlaps=False)]


BATCHES, LATER = batches(30, 1), batches(5, 2)
for place, method in enumerate(methods()):
    random_too = place % 2 == 1
    pipe = stalempi.Pipeline(
        net(dropout=random_too),
        optimizer=make_optimizer,
        loss=nn.functional.cross_entropy,
        method=method,
        split=CUTS,
        send_labels=random_too,
        stretch=straggle,
    )
    with pipe:
        for x, y in BATCHES:
            pipe.step(x, y)
        accuracy = pipe.evaluate(LATER)
        for x, y in LATER:
            pipe.step(x, y)
        state = pipe.state_dict()
        stats = pipe.stats
        momentum = [s["momentum_buffer"] for s in pipe.optimizer.state.values()] if pipe.optimizer else []
    modules = split(net(dropout=random_too), CUTS).modules
    reference = Reference(modules, method, make_optimizer, nn.functional.cross_entropy)
    for part in (BATCHES, LATER):
        for x, y in part:
            reference.step(x, y)
        reference.drain()
    want = {key: value for module in modules for key, value in module.state_dict().items()}
    ours = reference.runners[pipe.block].block.updater.optimizer
    assert ours is not None
    differ = [key for key in state if not torch.equal(state[key], want[key])]
    differ += [
        f"momentum {place}"
        for place, (mine, theirs) in enumerate(zip(momentum, ours.state.values(), strict=True))
        if not torch.equal(mine, theirs["momentum_buffer"])
    ]
    steady = max(stats.staleness, key=stats.staleness.__getitem__)
    print(context.rank, method, len(state), "staleness", steady, "differ", *differ, flush=True)
