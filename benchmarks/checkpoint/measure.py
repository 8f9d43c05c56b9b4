"""Measures how long a checkpoint keeps workers waiting: mpirun -n 2 python benchmarks/checkpoint/measure.py FOLDER.

A model of 100 MB under momentum SGD (200 MB of state), one worker that computes for 50 ms a step. Windows with a
checkpoint and without one alternate; what the worker waits longer for its releases in the former is the stall.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import stalempi
from stalempi.train.checkpoint import CheckpointStore
from stalempi.train.keeper import Keeper

STEPS, SAVES, COMPUTE = 8, 7, 0.05  # steps in a window; checkpoints; seconds


class Timed:
    """Times the copies and the writes of a keeper, on the server."""

    def __init__(self, keeper: Keeper) -> None:
        self.copies: list[float] = []
        self.writes: list[float] = []
        save, write = keeper.save, keeper._write

        def timed_save() -> None:
            began = time.perf_counter()
            save()
            self.copies.append(time.perf_counter() - began)

        def timed_write(store: CheckpointStore, parts: Mapping[str, Any]) -> None:
            began = time.perf_counter()
            write(store, parts)
            self.writes.append(time.perf_counter() - began)

        keeper.save, keeper._write = timed_save, timed_write  # type: ignore[method-assign]


def main() -> None:
    context = stalempi.init()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(25)))  # 105 MB
    checkpoint = stalempi.Checkpoint(sys.argv[1], every=2 * STEPS, resume="no")
    optimizer = stalempi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model=model,
        policy=stalempi.ASP(),
        checkpoint=checkpoint,
    )
    if context.is_server:
        assert optimizer._keeper is not None
        timed = Timed(optimizer._keeper)
        optimizer.serve()
        # the first and the last are not like the others: new memory, and nobody trains meanwhile
        copies, writes = timed.copies[1:-1], timed.writes[1:-1]
        copy, write = statistics.median(copies), statistics.median(writes)
        print(f"server: copy {copy:.3f} s, write {write:.3f} s, median of {len(writes)}", flush=True)
        return
    waits = []
    with optimizer:
        for _ in range(2 * STEPS * SAVES):
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            time.sleep(COMPUTE)
            began = time.perf_counter()
            optimizer.step(samples=1)
            waits.append(time.perf_counter() - began)
    windows = [sum(waits[start : start + STEPS]) for start in range(0, len(waits), STEPS)]
    # window 0 has no checkpoint, 1 none either, 2 the first one; that one takes new memory
    stalls = [windows[w] - (windows[w - 1] + windows[w + 1]) / 2 for w in range(4, len(windows) - 1, 2)]
    usual = statistics.median(waits)
    print(f"worker: a step waits {usual:.3f} s, a checkpoint adds {statistics.median(stalls):.3f} s", flush=True)


main()
