"""Holds what the measurements of emulated blocks share: blocks that sleep instead of computing, and how they run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import stalempi
from stalempi.bench.launch import find_launcher, launch_command
from stalempi.pipeline.dryrun import Done, period_of
from stalempi.pipeline.runner import Stretch

BATCH, WIDTH = 32, 64


class _Sleep(torch.autograd.Function):
    """Ends its forward at a moment, and lets its backward take a while; passes values and gradients on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, until: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        sleep_until(until)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class EmulatedBlock(nn.Module):
    """A linear layer that takes `forward` seconds for a batch, and `backward` seconds backwards; less for a part of it.

    It sleeps, so that blocks do not compete for the cores of one machine.
    """

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._forward, self._backward = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        """Maps (samples, WIDTH) to the same."""
        began, share = time.perf_counter(), len(x) / BATCH
        y: Tensor = _Sleep.apply(self.linear(x), began + share * self._forward, share * self._backward)
        return y


def sleep_until(moment: float) -> None:
    """Sleeps until `time.perf_counter()` is there."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def make_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, WIDTH), torch.randint(0, WIDTH, (BATCH,))


def measure_period(
    units: Iterable[nn.Module], method: stalempi.Schedule, batches: int, stretch: Stretch | None = None
) -> float:
    """Runs `batches` batches, a unit on each rank; returns the seconds that one takes on this block when all is full.

    As the dry run defines it (`period_of`): from the block's middle update to the last one before the drain.
    """
    done: list[Done] = []
    pipe = stalempi.Pipeline(
        model := nn.Sequential(*units),
        optimizer=make_optimizer,
        loss=nn.functional.cross_entropy,
        method=method,
        split=range(1, len(model)),
        stretch=stretch,
        record=done.append,
    )
    x, y = make_batch()
    with pipe:
        for _ in range(batches):
            pipe.step(x, y)
    return period_of(done)


def run_under_mpi(module: str, ranks: int, words: Iterable[str]) -> None:
    """Runs a benchmark's module on so many ranks; exits if it fails."""
    command = launch_command(find_launcher(), ranks, [sys.executable, "-m", module, *words])
    code = subprocess.run(command, check=False, timeout=600).returncode
    if code:
        sys.exit(code)


def environment() -> str:
    """Says in one line where a measurement was made."""
    from mpi4py import MPI  # noqa: PLC0415 - MPI starts when it is imported, which only the ranks may

    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    mpi = MPI.Get_library_version().split(",")[0]
    return (
        f"{len(os.sched_getaffinity(0))} core(s) {platform.machine()}, load average {load} at the start, "
        f"Python {platform.python_version()}, torch {torch.__version__}, {mpi}"
    )
