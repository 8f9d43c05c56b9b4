"""Measures how much of a push and its release is hidden behind a worker's computation.

mpirun -n 2 python benchmarks/overlap/measure.py: one server, one worker, ASP. The model has LAYERS layers of 4 MB; the
backward of each takes MS milliseconds and its forward half of that, on a device that computes by itself: the host waits
until the device would be done, and what hooks do meanwhile costs nothing if it is done by then. In turns: computing
alone, and steps that send nothing before `step` (off), from hooks, from hooks and a thread, these with a
forward that begins while the release arrives, and that run ahead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stalempi

MODES: dict[str, dict[str, Any]] = {
    "off": {"overlap": "off"},
    "hooks": {"overlap": "hooks"},
    "thread": {"overlap": "thread"},
    "early forward": {"overlap": "thread", "early_forward": True},
    "run ahead": {"run_ahead": True},
}


class Device:
    """Computes one thing after the other, without the host."""

    def __init__(self) -> None:
        self._until = 0.0

    def rest(self) -> None:
        """Begins anew: it has nothing to do."""
        self._until = time.perf_counter()

    def compute(self, seconds: float) -> None:
        """Returns when it has computed for `seconds` more."""
        self._until += seconds
        time.sleep(max(0.0, self._until - time.perf_counter()))


DEVICE = Device()


class Layer(nn.Module):
    """One whose gradient takes its time."""

    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(elements)), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Slow.apply(x, self.weight, self.seconds)
        return y


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        DEVICE.compute(seconds / 2)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        DEVICE.compute(ctx.seconds)
        return gradient, gradient.mean().expand(ctx.shape), None


def run(layers: int, elements: int, seconds: float, steps: int, mode: dict[str, Any] | None) -> tuple[float, float]:
    """Returns seconds a step, and the share of the push that had left when backward was over."""
    model = nn.Sequential(*(Layer(elements, seconds) for _ in range(layers)))
    inner = torch.optim.SGD(model.parameters(), lr=1e-9)
    if mode is None:
        return (0.0, 0.0) if stalempi.is_server() else (timed(model, inner, steps, lambda: None), 0.0)
    optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=stalempi.ASP(), **mode)
    if stalempi.is_server():
        return 0.0, optimizer.serve().workers[0].report()["hidden_share"]
    with optimizer:
        return timed(model, optimizer, steps, lambda: optimizer.step(samples=1)), 0.0


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, step: Callable[[], object]) -> float:
    took = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        DEVICE.rest()
        torch.autograd.backward(model(torch.zeros(1)).sum())
        step()
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--ms", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    context = stalempi.init(device="cpu")
    names = ["alone", *MODES]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name in names:
            mine = run(args.layers, 1_000_000, args.ms / 1e3, args.steps, MODES.get(name))
            everybody = context.transport.allgather(repr(mine).encode(), 600.0)
            pairs = [tuple(map(float, text.decode().strip("()").split(","))) for text in everybody]
            found[name].append((pairs[1][0], pairs[0][1]))
    if context.rank:
        return
    seconds = {name: statistics.median(time for time, _ in pairs) for name, pairs in found.items()}
    print("| | ms a step | added | of the exchange hidden | of the push gone when backward was over |")
    print("| --- | ---: | ---: | ---: | ---: |")
    exchange = seconds["off"] - seconds["alone"]
    for name in names:
        added = seconds[name] - seconds["alone"]
        gone = statistics.median(share for _, share in found[name])
        cells = (
            ["", "", ""] if name == "alone" else [f"{1e3 * added:.1f}", f"{1 - added / exchange:.0%}", f"{gone:.0%}"]
        )
        print(f"| {name} | {1e3 * seconds[name]:.1f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
