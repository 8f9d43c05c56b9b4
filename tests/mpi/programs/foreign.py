"""Sends messages of its own on COMM_WORLD, with stalempi's tags, while a job runs."""

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import stalempi

world = MPI.COMM_WORLD
context = stalempi.init()
assert stalempi.init() is context
tags = range(1, 6)
peer = (context.rank + 1) % context.size
source = (context.rank - 1) % context.size
sent = [np.full(1000, 10.0 * context.rank + tag) for tag in tags]
outgoing = [world.Isend(values, dest=peer, tag=tag) for values, tag in zip(sent, tags, strict=True)]

model = nn.Linear(50, 50)
inner = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=stalempi.BSP())
if context.is_server:
    assert optimizer.serve().updates == 20
else:
    with optimizer:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(3, 50)).square().mean().backward()
            optimizer.step()

received = np.empty(1000)
for tag in tags:
    world.Recv(received, source=source, tag=tag)
    assert (received == 10.0 * source + tag).all()
MPI.Request.Waitall(outgoing)
stalempi.shutdown()
assert not stalempi.is_initialized()
print("met nobody", flush=True)
