"""Measures what a stalempi step adds to a bare training loop: mpirun -n 2 python benchmarks/step_overhead/measure.py.

One server, one worker, a model of about 10,000 parameters. Bare and distributed steps alternate in rounds of the same
process, so that both see the same machine; the median round of each counts. Whole iterations, and `step` alone, again
and again with the same gradients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import stalempi

ROUNDS, STEPS = 40, 50


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return steps


def steps_alone(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(STEPS):
            optimizer.step()

    return steps


def seconds_per_step(steps: Callable[[], None]) -> float:
    began = time.perf_counter()
    steps()
    return (time.perf_counter() - began) / STEPS


def main() -> None:
    stalempi.init()
    torch.set_num_threads(1)
    model, bare_model = make_model(), make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=stalempi.ASP())
    if stalempi.is_server():
        optimizer.serve()
        return
    bare = torch.optim.SGD(bare_model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    with optimizer:
        print("| " + " | ".join(("parameters", "what", "bare, us", "stalempi, us", "added, us")) + " |")
        print("| ---: | --- | ---: | ---: | ---: |")
        report(model, "iteration", loop(bare_model, bare, x, y), loop(model, optimizer, x, y))
        report(model, "`step` alone", steps_alone(bare), steps_alone(optimizer))


def report(model: nn.Module, what: str, plain: Callable[[], None], ours: Callable[[], None]) -> None:
    rounds = [(seconds_per_step(plain), seconds_per_step(ours)) for _ in range(ROUNDS)]
    bare_us = 1e6 * statistics.median(a for a, _ in rounds)
    ours_us = 1e6 * statistics.median(b for _, b in rounds)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"| {parameters} | {what} | {bare_us:.0f} | {ours_us:.0f} | {ours_us - bare_us:.0f} |", flush=True)


if __name__ == "__main__":
    main()
