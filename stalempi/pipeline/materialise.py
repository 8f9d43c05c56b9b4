"""Fills in one block of a model that was built on the meta device, so that no rank ever holds the rest.

A unit's values are a function of the seed and of the unit's place in the whole model. So they do not depend on where
the model is cut, nor on who fills it in.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.split import Blocks, Tie, Unit, flatten, is_plain

__all__ = ["fill_unit", "materialise"]


def materialise(blocks: Blocks, number: int, *, seed: int, device: torch.device) -> nn.Module:
    """Gives block `number` of a model built under `torch.device("meta")` its values on `device`; returns the block.

    Every module in it that has parameters or buffers of its own must have `reset_parameters`, as torch's layers do;
    what a model's constructor did to them besides is not done here. Values are drawn on the CPU, unit by unit, so they
    are the same on every device. For a tied parameter of another block, the unit there that owns it is drawn too, and
    let go. Make optimizers afterwards: the block's parameters are new ones.

    Raises ConfigError if part of the block cannot be initialised in this way.
    """
    block = blocks.modules[number]
    starts = [0, *blocks.boundaries]
    shared = _shared_keys(block)
    units = flatten(block) if is_plain(block) else [Unit("", block)]  # a model of one block need not be sequential
    for index, unit in enumerate(units, starts[number]):
        fill_unit(unit, index, seed=seed, device=device)
    for first, *others in shared:  # new parameters were made for each place
        for key in others:
            path, _, name = key.rpartition(".")
            setattr(block.get_submodule(path), name, block.get_parameter(first))
    for tie in blocks.ties:
        mine = [key for key, home in zip(tie.keys, tie.blocks, strict=True) if home == number]
        if mine and tie.blocks[0] != number:
            value = _drawn_by_owner(blocks, tie, starts[tie.blocks[0]], seed)
            with torch.no_grad():
                block.get_parameter(mine[0]).copy_(value)
    return block


def fill_unit(unit: Unit, index: int, *, seed: int, device: torch.device) -> None:
    """Gives `unit`, the `index`-th of its model, the values that `seed` means, on `device`."""
    for name, part in unit.module.named_modules():
        if _own_tensors(part) and _reset_of(part) is None:
            place = f"{unit.name}.{name}".strip(".") or "the model"
            raise ConfigError(
                f"{place}, a {type(part).__name__}, has no reset_parameters(), so it cannot be built on the meta "
                "device and filled in: add it, or build the whole model on every rank"
            )
    unit.module.to_empty(device="cpu")
    tensors = {**dict(unit.module.named_parameters()), **dict(unit.module.named_buffers())}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for tensor in tensors.values():
            _mark_unset(tensor)
        torch.manual_seed(_unit_seed(seed, index))
        for part in reversed(list(unit.module.modules())):  # a module after its parts, which it may set anew
            reset = _reset_of(part)
            if reset is not None:
                reset()
    for key, tensor in tensors.items():
        if _is_unset(tensor):
            place = f"{unit.name}.{key}".lstrip(".")
            raise ConfigError(f"{place} is not set by reset_parameters() of its module: let it set all it has")
    unit.module.to(device)


def _shared_keys(block: nn.Module) -> list[list[str]]:
    places: dict[Tensor, list[str]] = {}
    for key, parameter in block.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(key)
    return [keys for keys in places.values() if len(keys) > 1]


def _drawn_by_owner(blocks: Blocks, tie: Tie, start: int, seed: int) -> Tensor:
    key = tie.keys[0]
    units = enumerate(flatten(blocks.modules[tie.blocks[0]]), start)
    index, owner = next((index, unit) for index, unit in units if key.startswith(f"{unit.name}."))
    drawn = Unit(owner.name, copy.deepcopy(owner.module))
    fill_unit(drawn, index, seed=seed, device=torch.device("cpu"))
    return drawn.module.get_parameter(key.removeprefix(f"{owner.name}."))


def _own_tensors(part: nn.Module) -> list[Tensor]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]


def _reset_of(part: nn.Module) -> Callable[[], None] | None:
    # MultiheadAttention and Transformer have it with an underscore
    reset: Callable[[], None] | None = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
    return reset


def _unit_seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")


def _mark_unset(tensor: Tensor) -> None:
    if tensor.dtype != torch.bool:
        tensor.fill_(_mark(tensor.dtype))


def _is_unset(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return False
    mark = _mark(tensor.dtype)
    return bool((tensor.isnan() if math.isnan(mark) else tensor == mark).any())


def _mark(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
