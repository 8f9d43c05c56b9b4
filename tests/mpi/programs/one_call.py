"""Trains in one call."""

import torch
from torch import nn

import stalempi


def train(model: nn.Module, optimizer: stalempi.DistributedOptimizer) -> int:
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    return optimizer.step_count


result = stalempi.run(
    train, nn.Linear(3, 2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), policy=stalempi.SSP(1), nonfinite="skip"
)
if stalempi.is_server():
    assert isinstance(result, stalempi.RunStats)
    print("samples", result.samples, flush=True)
else:
    assert result == 5
