"""Runs torch's own pipeline schedules (torch.distributed.pipelining over gloo) on an emulated block a rank."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.pipeline_speed.emulated import make_batch, make_optimizer

__all__ = ["SCHEDULES", "measure_torch"]

SCHEDULES: dict[str, Callable[..., Any]] = {"ScheduleGPipe": ScheduleGPipe, "Schedule1F1B": Schedule1F1B}


def measure_torch(  # noqa: PLR0913 - called in one place
    name: str,
    micro_batches: int,
    make_block: Callable[[], nn.Module],
    batches: int,
    *,
    store: Path,
    rank: int,
    size: int,
) -> float:
    """Trains `batches` batches; returns the seconds that one takes from the middle one to the last.

    Args:
        name: of the schedule.
        micro_batches: parts of a batch.
        make_block: makes the block of a rank.
        batches: how many.
        store: a file that does not exist yet, through which the ranks find each other.
        rank, size: of this rank's block, and number of blocks.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _train(SCHEDULES[name], micro_batches, make_block(), batches, rank, size)
    finally:
        dist.destroy_process_group()


def _train(
    schedule: Callable[..., Any], micro_batches: int, block: nn.Module, batches: int, rank: int, size: int
) -> float:
    step = PipelineStage(block, rank, size, torch.device("cpu"))
    pipe = schedule(step, n_microbatches=micro_batches, loss_fn=nn.functional.cross_entropy)
    optimizer = make_optimizer(block.parameters())
    x, y = make_batch()
    ends: list[float] = []
    for _ in range(batches):
        losses: list[Tensor] = []
        if rank == 0:
            pipe.step(x)
        elif rank == size - 1:
            pipe.step(target=y, losses=losses)
        else:
            pipe.step()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    first = (batches - 1) // 2
    return (ends[-1] - ends[first]) / (batches - 1 - first)
