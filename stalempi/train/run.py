"""Runs a whole data-parallel job in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from stalempi import context
from stalempi.policy.base import Policy
from stalempi.stats import RunStats
from stalempi.train.evaluation import Evaluation
from stalempi.train.optimizer import DistributedOptimizer

__all__ = ["run_job"]

T = TypeVar("T")


def run_job(
    train: Callable[[nn.Module, DistributedOptimizer], T],
    model: nn.Module,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    policy: Policy,
    **options: Any,
) -> RunStats | Evaluation | T:
    """Serves on rank 0, evaluates where asked to, and calls `train(model, optimizer)` on every other rank.

    Args:
        train: a worker's program.
        model: moved to this rank's device.
        optimizer: makes a torch optimizer from parameters, as in `lambda p: torch.optim.SGD(p, lr=0.1)`.
        policy: see DistributedOptimizer, which also takes `options`.

    Returns the RunStats on the server, the Evaluation on an evaluator, what `train` returned on the others, which leave
    whatever happens.
    """
    model.to(context.current().device)
    with DistributedOptimizer(optimizer(model.parameters()), model=model, policy=policy, **options) as wrapped:
        if context.current().is_server:
            stats = wrapped.serve()
            if options.get("evaluation"):
                wrapped.evaluate()
            return stats
        if context.current().is_evaluator:
            return wrapped.evaluate()
        return train(model, wrapped)
