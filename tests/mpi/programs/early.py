"""Trains with a server that makes the next part of its parameters every 20 ms, and looks at what is there when."""

import time
from typing import Any

import torch
from torch import nn

import stalempi
from stalempi.transport import mpi

LAYERS = 8


def make_model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Linear(100, 100) for _ in range(LAYERS)))


def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for number in range(5):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.full((3, 100), 0.1 * number)).square().mean())
        optimizer.step()
        if optimizer is distributed and not context.is_server:
            at_step.append(here())


def here() -> int:
    end: Any = distributed._worker.shares[0].end
    return end._here if distributed._worker.arriving else LAYERS


def send_slowly(self: Any, *args: Any) -> None:
    time.sleep(0.02)
    send(self, *args)


send = mpi._MpiServerEnd.send
setattr(mpi._MpiServerEnd, "send", send_slowly)  # noqa: B010 - mypy refuses the assignment
context = stalempi.init(device="cpu")
model, at_step, by_layer = make_model(), list[int](), list[int]()
distributed: Any = stalempi.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
    model=model,
    policy=stalempi.ASP(),
    bucket_bytes=41_000,
    early_forward=True,
)
if context.is_server:
    distributed.serve()
else:
    with distributed:
        train(distributed, model)
        for layer in model:
            layer.register_forward_hook(lambda *_: by_layer.append(here()))
        model(torch.ones(3, 100))
    alone = make_model()
    train(torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.5), alone)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    print(at_step, by_layer, max(float((a - b).abs().max()) for a, b in pairs), sep="\n", flush=True)
