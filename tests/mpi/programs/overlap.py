"""Trains with a slow backward and prints how much of the pushes had left when it was over: overlap.py WAY [fail]."""

import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import stalempi


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.03)
        if sys.argv[2:] == ["fail"] and optimizer.step_count == 3:
            raise ValueError("boom in backward")
        return gradient


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(Slow.apply(x))
        return y


context = stalempi.init(device="cpu")
torch.manual_seed(1)
model = nn.Sequential(*(Layer(500, 500) for _ in range(8)))
optimizer = stalempi.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model=model, policy=stalempi.ASP(), overlap=sys.argv[1]
)
if context.is_server:
    print(optimizer.serve().workers[0].report()["hidden_share"], flush=True)
else:
    with optimizer:
        for number in range(6):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.full((4, 500), 1.0 + number)).square().mean())
            optimizer.step()
