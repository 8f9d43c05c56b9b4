"""Trains PyTorch models over MPI with parameters of bounded or diverse staleness.

The gradient's path, data-parallel: rank 0 is the server, the other ranks are workers (or groups of them are).

    worker.py          transport/            server.py                       policy/
    gradient ── push ──> bytes ──> slot ──> event ──────────────────────────> decides
    new parameters <── release ── bytes <── applies, releases <── decisions ──┘

replica.py and flat.py lay the model out so that a push and a release are views of it. train/optimizer.py is what a user
holds of this path.
group.py puts a leader between a group's members and the server, with the same two messages. Under Allreduce there is
no server: peer.py takes the steps, and sums.py adds the gradients up. train/snapshots.py sends the model to an
evaluator, train/keeper.py to the disk; collectives.py is for the workers among themselves.

A model-parallel job has no server; block k of the model is on the k-th of consecutive ranks.

    pipeline/schedules.py   pipeline/runner.py                      pipeline/link.py, transport/links.py
    F5 <B3 B3 U3 ...  ────> block k ── activation ──> link ──> block k+1
                            block k <─ error grad ─── link <── block k+1

pipeline/block.py computes; pipeline/pipeline.py is what a user holds of this path.

entry.py joins both paths to MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stalempi import context as _context
from stalempi.collectives import (
    allreduce,
    barrier,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
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
from stalempi.preempt import PREEMPTED, Preempted
from stalempi.stats import RunStats, WorkerStats
from stalempi.train.evaluation import Evaluation
from stalempi.train.keeper import Checkpoint
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
    "PREEMPTED",
    "SSP",
    "Allreduce",
    "BlockOptions",
    "CachedSSP",
    "Checkpoint",
    "ConfigError",
    "Context",
    "DataLoader",
    "DistributedOptimizer",
    "DistributedSampler",
    "Evaluation",
    "GPipe",
    "NonFiniteError",
    "OneForwardOneBackward",
    "PipeDream",
    "Pipeline",
    "PipelineStats",
    "Policy",
    "Preempted",
    "ProtocolError",
    "RunStats",
    "Schedule",
    "StalempiError",
    "StallError",
    "TwoBW",
    "UpdateOptions",
    "WorkerStats",
    "__version__",
    "allreduce",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "device",
    "group_rank",
    "group_size",
    "init",
    "is_evaluator",
    "is_initialized",
    "is_server",
    "local_rank",
    "local_size",
    "num_shards",
    "num_workers",
    "rank",
    "run",
    "shard_rank",
    "shutdown",
    "size",
    "worker_rank",
]

is_initialized = _context.is_initialized


def rank() -> int:
    """Returns this rank's place in the job, 0 .. size - 1."""
    return _context.current().rank


def size() -> int:
    """Returns the number of ranks, the server (and the evaluator) included."""
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


def is_evaluator() -> bool:
    """Returns whether this rank tests the model while the others train it."""
    return _context.current().is_evaluator


def worker_rank() -> int | None:
    """Returns the number of this rank's worker, 0 .. num_workers - 1; None on the server and the evaluator."""
    return _context.current().worker_rank


def num_workers() -> int:
    """Returns the number of workers in the job, each of `group_size` ranks."""
    return _context.current().num_workers


def group_rank() -> int | None:
    """Returns this rank's place in its worker, 0 leads; None on the server and the evaluator."""
    return _context.current().group_rank


def group_size() -> int:
    """Returns the number of ranks that make one worker."""
    return _context.current().group_size


def shard_rank() -> int | None:
    """Returns this rank's number among those that compute, 0 .. num_shards - 1; None on the others."""
    return _context.current().shard_rank


def num_shards() -> int:
    """Returns the number of ranks that compute, each with a shard of the data."""
    return _context.current().num_shards


def device() -> torch.device:
    """Returns where this rank computes."""
    return _context.current().device


def run(
    train: Callable[[nn.Module, DistributedOptimizer], Any],
    model: nn.Module,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    policy: Policy,
    group: int = 1,
    evaluator: bool = False,
    **options: Any,
) -> Any:
    """Initialises where needed, see `init`, then does what `stalempi.train.run.run_job` says: a job in one call."""
    init(group=group, evaluator=evaluator)
    return run_job(train, model, optimizer=optimizer, policy=policy, **options)
