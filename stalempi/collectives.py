"""Is what users call to speak to the other ranks that compute, between steps.

Every rank that computes makes the same calls in the same order; the server and the evaluator make none. A rank that
calls something else is named in a ConfigError on all of them. One that does not call, or whose program has ended, ends
the job with a StallError after the stall timeout (STALEMPI_STALL_TIMEOUT, 600 s). There is no `join`: where ranks have
uneven data, call after closing the optimizer, when nobody waits for a step of another, or where all have taken as many
steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stalempi import context
from stalempi.errors import ConfigError
from stalempi.peers import Peers
from stalempi.train.optimizer import DistributedOptimizer

__all__ = ["allreduce", "barrier", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

V = TypeVar("V")


def allreduce(value: V, op: str = "mean", *, name: str | None = None) -> V:
    """Returns the mean, sum, min or max of `value` over the ranks that compute, the same bits on each.

    Args:
        value: a number, numpy array or tensor of the same shape and type on every rank; it is not changed. The mean of
            a Python int is a float; the mean of integer arrays and tensors is refused.
        op: "mean", "sum", "min" or "max".
        name: compared between the ranks, and named where they differ.

    float16 and bfloat16 are added in float32, on the host. The result is of the type, shape and device of `value`, and
    has no gradient. Raises ConfigError for anything else, StallError if a rank does not call it.
    """
    return _peers("allreduce").allreduce(value, op, name)


def broadcast_object(obj: Any, root: int = 0, *, name: str | None = None) -> Any:
    """Returns rank `root`'s `obj` on every rank that computes; what the others give does not matter.

    Args:
        obj: None, booleans, numbers, text, lists, tuples, dicts of these, and dense tensors among them.
        root: number among the ranks that compute, 0 .. num_shards - 1.
        name: compared between the ranks.

    Raises ConfigError for other types, since nothing is pickled.
    """
    return _peers("broadcast_object").broadcast_object(obj, root, name)


def broadcast_parameters(
    params: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], root: int = 0
) -> None:
    """Gives every rank that computes rank `root`'s values of a module, state_dict or named parameters, in place.

    Seldom needed: a DistributedOptimizer gives all ranks the server's weights when it is constructed.

    Raises ConfigError if names, shapes or dtypes differ between the ranks.
    """
    _peers("broadcast_parameters").broadcast_parameters(params, root)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Gives every rank that computes rank `root`'s state and hyper-parameters of a torch optimizer, in place.

    Of a DistributedOptimizer these are the hyper-parameters, since its state lives on the server.
    """
    state = optimizer.state_dict()
    if isinstance(optimizer, DistributedOptimizer):
        state["state"] = {}
    received = _peers("broadcast_optimizer_state").broadcast_object(state, root, "optimizer")
    if received is state:
        return
    for group, theirs in zip(optimizer.param_groups, received["param_groups"], strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})
    if not isinstance(optimizer, DistributedOptimizer):
        optimizer.load_state_dict(received)


def barrier() -> None:
    """Returns once every rank that computes has called it."""
    _peers("barrier").barrier()


def _peers(what: str) -> Peers:
    found = context.current().peers
    if found is None:
        raise ConfigError(f"{what} is among the ranks that compute, but this is the {context.current().role}")
    return found
