"""Trains under ASP; writes each worker's process id to a folder, and its clock as it goes: pause.py FOLDER."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import stalempi

folder = Path(sys.argv[1])
context = stalempi.init()
model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))  # 8 MB: a push takes a while
inner = torch.optim.SGD(model.parameters(), lr=0.001)
optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=stalempi.ASP(), bucket_bytes=1 << 18)
if context.is_server:
    stats = optimizer.serve()
    assert stats.samples == 4 * sum(worker.iterations for worker in stats.workers)
    print("iterations", *(worker.iterations for worker in stats.workers), flush=True)
else:
    (folder / f"pid-{context.rank}").write_text(str(os.getpid()))
    ends = time.monotonic() + 6
    with optimizer:
        while time.monotonic() < ends:
            optimizer.zero_grad()
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            (folder / f"new-{context.rank}").write_text(str(optimizer.step_count))
            (folder / f"new-{context.rank}").replace(folder / f"clock-{context.rank}")  # whole whenever we are stopped
