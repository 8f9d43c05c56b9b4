"""Is one rank of a job that measures the server: workers that sleep, then push, and compute nothing.

    mpirun -n 5 python benchmarks/scaling/served.py PARAMETERS SLEEP_S SECONDS

Rank 0 prints the updates per second.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import stalempi


def main() -> None:
    """Runs the job."""
    parameters, pause, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    stalempi.init()
    torch.set_num_threads(1)
    weight = nn.Parameter(torch.zeros(parameters))
    model = nn.ParameterList([weight])
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=stalempi.ASP())
    if stalempi.is_server():
        stats = optimizer.serve()
        print(stats.updates / stats.seconds, flush=True)
        return
    gradient = torch.ones(parameters)
    with optimizer:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(pause)
            weight.grad = gradient
            optimizer.step()


if __name__ == "__main__":
    main()
