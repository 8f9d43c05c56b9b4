"""Trains under BSP; worker 0 is stopped for 5 s in the middle of a push; compares with training in one process."""

import os
import signal
import subprocess
from typing import Any

import torch
from torch import Tensor, nn

import stalempi

STOP_AT = 4


class Stopped(torch.autograd.Function):
    """Stops this process in its backward, once some of the gradients behind it have been sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
        worker = optimizer._worker
        assert worker is not None
        print("sent before the stop:", worker.shares[0].buckets.handed, flush=True)  # type: ignore[union-attr]
        os.kill(os.getpid(), signal.SIGSTOP)
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(500, 600), nn.Linear(600, 700)

    def forward(self, x: Tensor, stop: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        y: Tensor = self.second(Stopped.apply(x) if stop else x)
        return y


def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice, *, stops: bool = False) -> None:
    draws = torch.Generator().manual_seed(3)
    for number in range(8):
        x = torch.randn(8, 500, generator=draws)
        optimizer.zero_grad()
        model(x[part], stops and number == STOP_AT).square().mean().backward()
        optimizer.step()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


context = stalempi.init()
model = Net()
optimizer = stalempi.DistributedOptimizer(momentum(model), model=model, policy=stalempi.BSP(), bucket_bytes=1 << 16)
if context.is_server:
    stats = optimizer.serve()
    alone = Net()
    train(alone, momentum(alone), slice(None))
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    applied = [worker.applied for worker in stats.workers]
    print("difference", max(float((a - b).abs().max()) for a, b in pairs), applied, flush=True)
else:
    with optimizer:
        train(model, optimizer, slice(context.worker_rank, None, 2), stops=context.worker_rank == 0)
