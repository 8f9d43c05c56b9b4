"""Decides where a model is cut, and gives a rank its own block of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.export import split_exported
from stalempi.pipeline.materialise import materialise
from stalempi.pipeline.measure import best_boundaries, measure
from stalempi.pipeline.schedules import Schedule
from stalempi.pipeline.split import Tie, flatten, split

__all__ = ["Cut", "Plan", "check_split", "choose_plan", "cut", "known_plan"]


@dataclass(frozen=True)
class Plan:
    """How all ranks cut the model, as rank 0 decided: plain values, so that they can be told.

    Attributes:
        boundaries: index of the first unit of each block but the first, or names of modules that begin one.
        shapes, dtypes: of a batch's tensors; what a model that has to be traced is traced with.
    """

    boundaries: list[int] | list[str]
    shapes: list[list[int]]
    dtypes: list[str]


@dataclass(frozen=True)
class Cut:
    """One rank's block, on its device, and the parameters that blocks share."""

    module: nn.Module
    ties: tuple[Tie, ...]


def check_split(model: nn.Module, boundaries: Sequence[int] | Sequence[str] | None, blocks: int) -> None:
    """Raises ConfigError if the model cannot be cut so into so many blocks."""
    if boundaries is not None and len(boundaries) != blocks - 1:
        raise ConfigError(f"split has {len(boundaries)} boundaries for {blocks} block(s): give one less than blocks")
    if blocks > 1 and (boundaries is None or not _are_names(boundaries)):
        units = len(flatten(model))
        if units < blocks:
            raise ConfigError(f"{blocks} blocks of a model of {units} unit(s): start fewer ranks")


def choose_plan(
    model: nn.Module,
    boundaries: Sequence[int] | Sequence[str] | None,
    blocks: int,
    schedule: Schedule,
    inputs: Sequence[Tensor],
    device: torch.device,
) -> Plan:
    """Returns the plan of a model, timed on the batch `inputs` where the user did not say where to cut."""
    shapes, dtypes = [list(x.shape) for x in inputs], [str(x.dtype).removeprefix("torch.") for x in inputs]
    if boundaries is not None:
        return Plan(list(boundaries), shapes, dtypes)  # type: ignore[arg-type]
    if not _is_meta(model):
        model.to(device)
    costs = measure(model, inputs[0])
    hidden = not schedule.recomputes or schedule.overlaps
    return Plan(list(best_boundaries(costs, blocks, recompute_hidden=hidden)), shapes, dtypes)


def known_plan(boundaries: Sequence[int] | Sequence[str] | None, blocks: int) -> Plan | None:
    """Returns the plan that needs no batch, if there is one: cut by indices, or not at all."""
    if blocks > 1 and (boundaries is None or _are_names(boundaries)):
        return None
    return Plan([int(place) for place in boundaries or ()], [], [])


def cut(model: nn.Module, plan: Plan, block: int, *, seed: int, device: torch.device) -> Cut:
    """Cuts the model and returns block number `block` on `device`, filled in there if built on the meta device.

    Raises ConfigError if it cannot be cut so.
    """
    if _are_names(plan.boundaries):
        sample = tuple(
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for shape, dtype in zip(plan.shapes, plan.dtypes, strict=True)
        )
        if _is_meta(model):
            raise ConfigError("a model that is cut by names of modules has to be traced: build it on a real device")
        found = split_exported(model.to(device), sample, [str(name) for name in plan.boundaries])
    else:
        found = split(model, [int(place) for place in plan.boundaries])
    if _is_meta(found.modules[block]):
        return Cut(materialise(found, block, seed=seed, device=device), found.ties)
    return Cut(found.modules[block].to(device), found.ties)


def _are_names(boundaries: Sequence[int] | Sequence[str]) -> bool:
    return len(boundaries) > 0 and isinstance(boundaries[0], str)


def _is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())
