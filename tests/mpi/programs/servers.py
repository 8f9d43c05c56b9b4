"""Trains under BSP on SERVERS servers and compares with one process: servers.py SERVERS [die RANK | term RANK | nan]

With term the workers never end by themselves.
"""

import os
import signal
import sys

import torch
from torch import nn

import stalempi


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice, poor: bool = False) -> None:
    draws = torch.Generator().manual_seed(3)
    for number in range(15):
        x, y = torch.randn(12, 8, generator=draws), torch.randint(3, (12,), generator=draws)
        if poor and number == 7:
            x = x * float("nan")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


servers, *what = sys.argv[1:]
context = stalempi.init(servers=int(servers))
model = make_model()
optimizer = stalempi.DistributedOptimizer(
    momentum(model), model=model, policy=stalempi.BSP(), bucket_bytes=4096, stall_timeout=30.0
)
if context.is_server:
    if what[:1] == ["die"] and int(what[1]) == context.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if what[:1] == ["term"] and int(what[1]) == context.rank:
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.serve()
    if context.rank == 0:
        alone = make_model()
        train(alone, momentum(alone), slice(None))
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        print(max(float((a - b).abs().max()) for a, b in pairs), flush=True)
else:
    with optimizer:
        part = slice(context.worker_rank, None, context.num_workers)
        train(model, optimizer, part, poor=what == ["nan"])
        while what[:1] == ["term"]:
            train(model, optimizer, part)
