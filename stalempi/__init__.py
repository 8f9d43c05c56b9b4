"""Trains PyTorch models over MPI with parameters of bounded or diverse staleness.

The gradient's path, data-parallel: rank 0 is the server, the other ranks are workers.

    worker.py          transport/            server.py                       policy/
    gradient ── push ──> bytes ──> slot ──> event ──────────────────────────> decides
    new parameters <── release ── bytes <── applies, releases <── decisions ──┘

A model-parallel job has no server; block k of the model is on the k-th of consecutive ranks.

    pipeline/schedules.py   pipeline/runner.py                      pipeline/link.py, transport/links.py
    F5 <B3 B3 U3 ...  ────> block k ── activation ──> link ──> block k+1
                            block k <─ error grad ─── link <── block k+1

pipeline/block.py computes; pipeline/pipeline.py is what a user holds of this path.

replica.py and flat.py lay the model out so that a push and a release are views of it. train/optimizer.py is what a user
holds of this path; entry.py joins it to MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stalempi import context as _context
from stalempi.context import Context
from stalempi.entry import init, shutdown
from stalempi.errors import ConfigError, NonFiniteError, ProtocolError, StalempiError, StallError
from stalempi.pipeline.build import BlockOptions
from stalempi.pipeline.pipeline import Pipeline, PipelineStats
from stalempi.pipeline.schedules import (
    BP,
    DDG,
    DNI,
    DSP,
    FR,
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    Schedule,
    TwoBW,
)
from stalempi.pipeline.update import UpdateOptions
from stalempi.policy import ASP, BSP, DSSP, SSP, Allreduce, CachedSSP, Policy
from stalempi.stats import RunStats, WorkerStats
from stalempi.train.loader import DataLoader
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.train.run import run_job
from stalempi.train.sampler import DistributedSampler
from stalempi.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = [
    "ASP",
    "BP",
    "BSP",
    "DDG",
    "DNI",
    "DSP",
    "DSSP",
    "FR",
    "SSP",
    "Allreduce",
    "BlockOptions",
    "CachedSSP",
    "ConfigError",
    "Context",
    "DataLoader",
    "DistributedOptimizer",
    "DistributedSampler",
    "GPipe",
    "NonFiniteError",
    "OneForwardOneBackward",
    "PipeDream",
    "Pipeline",
    "PipelineStats",
    "Policy",
    "ProtocolError",
    "RunStats",
    "Schedule",
    "StalempiError",
    "StallError",
    "TwoBW",
    "UpdateOptions",
    "WorkerStats",
    "__version__",
    "device",
    "init",
    "is_initialized",
    "is_server",
    "local_rank",
    "local_size",
    "num_workers",
    "rank",
    "run",
    "shutdown",
    "size",
    "worker_rank",
]

is_initialized = _context.is_initialized


def rank() -> int:
    """Returns this rank's place in the job, 0 .. size - 1."""
    return _context.current().rank


def size() -> int:
    """Returns the number of ranks, the server included."""
    return _context.current().size


def local_rank() -> int:
    """Returns this rank's place among the ranks of its node."""
    return _context.current().local_rank


def local_size() -> int:
    """Returns the number of ranks on this node."""
    return _context.current().local_size


def is_server() -> bool:
    """Returns whether this rank is the parameter server."""
    return _context.current().is_server


def worker_rank() -> int | None:
    """Returns this worker's number, 0 .. num_workers - 1; None on the server."""
    return _context.current().worker_rank


def num_workers() -> int:
    """Returns the number of workers in the job."""
    return _context.current().num_workers


def device() -> torch.device:
    """Returns where this rank computes."""
    return _context.current().device


def run(
    train: Callable[[nn.Module, DistributedOptimizer], Any],
    model: nn.Module,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    policy: Policy,
    **options: Any,
) -> Any:
    """Initialises where needed, then does what `stalempi.train.run.run_job` says: a whole job in one call."""
    init()
    return run_job(train, model, optimizer=optimizer, policy=policy, **options)
