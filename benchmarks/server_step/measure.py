"""Measures what a step costs once its gradient is there, by optimizer and bucket size.

mpirun -n 2 python benchmarks/server_step/measure.py: one server, one worker, 100 MB of parameters in 100 layers, and
nothing sent early. A step is the check for NaN, the push, the server's update and the release. With one bucket for all,
the server steps once over all memory and then releases it; with more, each is stepped while it is in the cache and
released while the next one is stepped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

import stalempi

LAYERS, STEPS, ROUNDS = 100, 8, 3
SIZES = (0.25, 1.0, 4.0, 16.0, 256.0)  # MiB
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.001),
}


def seconds(make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer], bucket_mb: float) -> list[float]:
    """Returns the seconds of each step; [] on the server."""
    model = nn.Sequential(*(nn.Linear(500, 500) for _ in range(LAYERS)))
    optimizer = stalempi.DistributedOptimizer(
        make(model.parameters()),
        model=model,
        policy=stalempi.ASP(),
        overlap="off",
        bucket_bytes=round(bucket_mb * 2**20),
    )
    if stalempi.is_server():
        optimizer.serve()
        return []
    found = []
    with optimizer:
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.autograd.backward([parameter.sum() for parameter in model.parameters()])
            began = time.perf_counter()
            optimizer.step(samples=1)
            found.append(time.perf_counter() - began)
    return found[2:]


def main() -> None:
    stalempi.init()
    torch.set_num_threads(1)
    times: dict[tuple[str, float], list[float]] = {}
    for _ in range(ROUNDS):
        for name, make in OPTIMIZERS.items():
            for size in SIZES:
                times.setdefault((name, size), []).extend(seconds(make, size))
    if stalempi.is_server():
        return
    print("| ms a step | " + " | ".join(f"{size:g} MiB" for size in SIZES[:-1]) + " | one bucket |")
    print("| --- |" + " ---: |" * len(SIZES))
    for name in OPTIMIZERS:
        row = [f"{1e3 * statistics.median(times[name, size]):.1f}" for size in SIZES]
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
