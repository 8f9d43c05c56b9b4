"""Takes a sequential model apart into units and blocks whose state_dict keys stay those of the whole model.

model, nn.Sequential  ── flatten ──> units: what may be cut between, one tensor from each to the next
                      ── split ────> blocks: rows of units, nested and named as in the model
state_dicts of blocks ── merge_state_dicts ──> that of the whole model
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.partition import check_boundaries

__all__ = ["Blocks", "Tie", "Unit", "flatten", "is_plain", "merge_state_dicts", "part_ties", "split"]


class Unit(NamedTuple):
    """A part of a model that is never cut, under its name in the model, as in `layer1.0`."""

    name: str
    module: nn.Module


class Tie(NamedTuple):
    """One parameter that several blocks have a copy of: under `keys[i]` in block `blocks[i]`.

    The first is the owner. Whoever trains the blocks adds up the copies' gradients, so that the copies stay equal.
    """

    keys: tuple[str, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A model in blocks.

    Attributes:
        modules: the blocks; their state_dict keys are those of the whole model and no two blocks have one in common.
        ties: the parameters that several blocks have a copy of.
        boundaries: the index of the first unit of each block but the first.
    """

    modules: tuple[nn.Module, ...]
    ties: tuple[Tie, ...]
    boundaries: tuple[int, ...]


def flatten(model: nn.Module) -> list[Unit]:
    """Lists the units of an `nn.Sequential` in order; Sequentials inside it are opened.

    One that does more than call its children in order (its own `forward`, or hooks) stays whole.

    Raises ConfigError if `model` cannot be opened or is empty.
    """
    if not is_plain(model):
        raise ConfigError(
            f"a {type(model).__name__} is no plain nn.Sequential, so there is nothing to cut between: "
            "make it one, or split it with split_exported"
        )
    units = _units(model, "")
    if not units:
        raise ConfigError("the model is an empty nn.Sequential: give it layers")
    return units


def split(model: nn.Module, boundaries: Sequence[int]) -> Blocks:
    """Cuts `model` before each unit whose index is in `boundaries`; without any, any model is one block.

    The model is used up: its modules are the blocks' own from now on. A parameter that units of several blocks share
    becomes a copy in each of them, named in `Blocks.ties`.

    Raises ConfigError if the model cannot be opened, a boundary is none, or a module with state is in two blocks.
    """
    if not boundaries:
        return Blocks((model,), (), ())
    units = flatten(model)
    cuts = check_boundaries(boundaries, len(units))
    blocks = tuple(_nest(units[i:j], training=model.training) for i, j in pairwise([0, *cuts, len(units)]))
    _refuse_shared_modules(blocks)
    return Blocks(blocks, part_ties(blocks), cuts)


def merge_state_dicts(parts: Sequence[Mapping[str, Any]], ties: Sequence[Tie] = ()) -> dict[str, Any]:
    """Joins the state_dicts of all blocks, in their order, into one that loads strictly into the whole model.

    Raises ConfigError if two parts have the same key, or copies of a tied parameter differ.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        if twice := merged.keys() & part.keys():
            raise ConfigError(f"{min(twice)} is in the state of two blocks: merge the blocks of one split, each once")
        merged |= part
    for tie in ties:
        first, *others = tie.keys
        if absent := set(tie.keys) - merged.keys():
            raise ConfigError(f"tied parameter {min(absent)} is in no block's state: merge all blocks of the split")
        for other in others:
            if not torch.equal(merged[first].cpu(), merged[other].cpu()):
                raise ConfigError(
                    f"copies of one parameter differ: {first} and {other}; were their gradients added up?"
                )
            merged[other] = merged[first]
    return merged


def part_ties(blocks: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Gives each block its own copy of every parameter that several blocks share, and names those parameters."""
    owners: dict[Tensor, list[tuple[str, int]]] = {}
    for number, block in enumerate(blocks):
        for key, parameter in block.named_parameters(remove_duplicate=False):
            owners.setdefault(parameter, []).append((key, number))
    ties = []
    for shared, places in owners.items():
        keys, numbers = zip(*places, strict=True)
        if len(set(numbers)) == 1:
            continue
        ties.append(Tie(keys, numbers))
        copies: dict[int, nn.Parameter] = {}
        for key, number in places:
            if number != numbers[0]:
                if number not in copies:
                    copies[number] = nn.Parameter(shared.detach().clone(), shared.requires_grad)
                path, _, name = key.rpartition(".")
                setattr(blocks[number].get_submodule(path), name, copies[number])
    return tuple(ties)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is an `nn.Sequential` that does no more than call its children in order."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own_state = {**module._parameters, **module._buffers}
    return type(module).forward is nn.Sequential.forward and not any(hooks) and not own_state


def _units(model: nn.Module, prefix: str) -> list[Unit]:
    units: list[Unit] = []
    # not named_children: that leaves out a module's second appearance
    for name, module in model._modules.items():
        assert module is not None
        opened = _units(module, f"{prefix}{name}.") if is_plain(module) else [Unit(prefix + name, module)]
        units.extend(opened)
    return units


def _nest(units: Sequence[Unit], *, training: bool) -> nn.Sequential:
    """Builds the Sequential in which every unit has its name in the whole model."""
    children: OrderedDict[str, list[Unit]] = OrderedDict()
    for name, module in units:
        first, _, rest = name.partition(".")
        children.setdefault(first, []).append(Unit(rest, module))
    nested = nn.Sequential()
    for name, inner in children.items():
        nested.add_module(name, _nest(inner, training=training) if inner[0].name else inner[0].module)
    nested.training = training  # of this container alone: parts of the model may be in another mode
    return nested


def _refuse_shared_modules(blocks: Sequence[nn.Module]) -> None:
    homes: dict[nn.Module, tuple[str, int]] = {}
    for number, block in enumerate(blocks):
        for name, module in block.named_modules(remove_duplicate=False):
            if not module._parameters and not module._buffers:
                continue
            first, home = homes.setdefault(module, (name, number))
            if home != number:
                raise ConfigError(
                    f"{first} in block {home} and {name} in block {number} are one module: cut elsewhere, or let two "
                    "modules share its parameters"
                )
