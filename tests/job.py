"""Runs a whole data-parallel job in one process, a thread per rank, for tests of the server and the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stalempi.context import Context
from stalempi.correction import make_correction
from stalempi.policy import Policy
from stalempi.roles import assign_role
from stalempi.stats import RunStats
from stalempi.train.evaluation import Evaluation
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport.inproc import InprocTransport, run_ranks

__all__ = ["Job", "make_context", "run_job"]

Train = Callable[[nn.Module, DistributedOptimizer, int], object]


@dataclass(frozen=True)
class Job:
    """What a job left: the server's model and counts, and the model of every other rank."""

    model: nn.Module
    stats: RunStats
    workers: list[nn.Module]


def make_context(transport: InprocTransport, *, group: int = 1, evaluator: bool = False, servers: int = 1) -> Context:
    """Returns the context of a rank of an in-process job."""
    role = assign_role(transport.rank, transport.size, group=group, evaluator=evaluator, servers=servers)
    return Context(
        rank=transport.rank,
        size=transport.size,
        local_rank=transport.rank,
        local_size=transport.size,
        device=torch.device("cpu"),
        role=role,
        transport=transport,
    )


def run_job(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    policy: Policy,
    train: Train,
    *,
    workers: int,
    group: int = 1,
    evaluation: Callable[[], Evaluation] | None = None,
    evaluator: bool = False,
    servers: int = 1,
    delivery: float = 0.0,
    **options: Any,
) -> Job:
    """Runs `train(model, optimizer, shard)` on every rank that computes and serves; `options` go to the optimizer."""

    ranks = servers + workers * group + evaluator
    models = [make_model() for _ in range(ranks)]  # here, since torch's generator is shared by all threads

    def main(transport: InprocTransport) -> tuple[nn.Module, RunStats | None]:
        context = make_context(transport, group=group, evaluator=evaluator, servers=servers)
        model = models[transport.rank]
        kept = {"stall_timeout": 20.0, "evaluation": evaluation() if evaluation else None} | options
        if isinstance(kept.get("correction"), str):  # each server has one of its own
            kept["correction"] = make_correction(kept["correction"])
        optimizer = DistributedOptimizer(make_optimizer(model), model=model, policy=policy, context=context, **kept)
        if context.is_server:
            stats = optimizer.serve()
            if evaluation and context.rank == 0:
                optimizer.evaluate()
            return model, stats
        if context.shard_rank is None:
            optimizer.evaluate()
            return model, None
        with optimizer:
            train(model, optimizer, context.shard_rank)
        return model, None

    (server, stats), *rest = run_ranks(main, ranks, delivery=delivery)
    assert stats is not None
    return Job(server, stats, [model for model, _ in rest])
