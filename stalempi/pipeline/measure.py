"""Measures what each unit of a model costs, and cuts where that is best."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.materialise import fill_unit
from stalempi.pipeline.partition import Memory, partition
from stalempi.pipeline.split import Unit, flatten

__all__ = ["UnitCost", "best_boundaries", "measure", "memory_bounds"]

T = TypeVar("T")


@dataclass(frozen=True)
class UnitCost:
    """What one unit takes for one batch.

    Attributes:
        name: of the unit in the model.
        forward: seconds without a graph.
        recompute: seconds of the forward that builds the graph.
        backward: seconds.
        parameter_bytes: of its parameters.
        saved_bytes: what its graph holds between recompute and backward, parameters not counted.
        input_bytes: of the tensor that enters it, which travels and is stored where a block begins.
    """

    name: str
    forward: float
    recompute: float
    backward: float
    parameter_bytes: int
    saved_bytes: int
    input_bytes: int


def measure(model: nn.Module, sample: Tensor, *, repeats: int = 5) -> list[UnitCost]:
    """Times every unit of `model` on one batch `sample`, on the device of that; medians of `repeats` runs.

    Works on copies, one unit at a time: parameters, gradients, running statistics and the random state stay as they
    are, and a model on the meta device stays there. Dropout and BatchNorm are in the mode that the model is in.

    Raises ConfigError if the model cannot be opened, or a unit does not make one tensor of one.
    """
    if repeats < 1:
        raise ConfigError(f"repeats={repeats}: measure at least once")
    costs, x = [], sample.detach()
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        for number, unit in enumerate(flatten(model)):
            copied = Unit(unit.name, copy.deepcopy(unit.module))
            if any(parameter.is_meta for parameter in unit.module.parameters()):
                fill_unit(copied, number, seed=0, device=x.device)
            cost, x = _measure_unit(copied, x, repeats, first=number == 0)
            costs.append(cost)
    return costs


def best_boundaries(
    costs: Sequence[UnitCost],
    blocks: int,
    *,
    recompute_hidden: bool = False,
    bytes_per_second: float = math.inf,
    memory: Memory | None = None,
) -> tuple[int, ...]:
    """Finds the boundaries that make the slowest of so many blocks fastest, see `partition`.

    Args:
        costs: as measured.
        blocks: K.
        recompute_hidden: recompute runs beside the forward and costs nothing.
        bytes_per_second: of a link; an activation and an error gradient of its size cross it per batch.
        memory: bounds that hold, see `memory_bounds`.

    Raises ConfigError if there are too few units or they do not fit.
    """
    if not bytes_per_second > 0:
        raise ConfigError(f"bytes_per_second={bytes_per_second}: give more than 0")
    seconds = [c.forward + c.backward + (0.0 if recompute_hidden else c.recompute) for c in costs]
    transfer = [2 * c.input_bytes / bytes_per_second for c in costs]
    return partition(seconds, blocks, transfer=transfer, memory=memory)


def memory_bounds(
    costs: Sequence[UnitCost], limits: Sequence[float], *, held: Sequence[int] = (), copies: int = 3
) -> Memory:
    """Says what blocks of these units need, and that block k has limits[k] bytes.

    Args:
        costs: as measured.
        limits: of each block, bytes.
        held: inputs that each block holds at once, m_k + 1 in DSP [default: 1 each].
        copies: of the parameters: themselves, gradients, momentum.
    """
    if copies < 1:
        raise ConfigError(f"copies={copies}: the parameters themselves are one")
    units = [copies * c.parameter_bytes + c.saved_bytes for c in costs]
    return Memory(units, [c.input_bytes for c in costs], held or [1] * len(limits), limits)


def _measure_unit(unit: Unit, x: Tensor, repeats: int, *, first: bool) -> tuple[UnitCost, Tensor]:
    module = unit.module
    x = x.detach().requires_grad_(x.is_floating_point() and not first)
    saved = _Saved(module)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed):
        y = module(x)
    if not isinstance(y, Tensor):
        raise ConfigError(f"unit {unit.name} makes a {type(y).__name__} of a tensor: between units passes one tensor")
    taken = list(filter(lambda t: t.requires_grad, [x, *module.parameters()])) if y.requires_grad else []
    forwards, recomputes, backwards = [], [], []
    for _ in range(repeats):
        with torch.no_grad():
            forwards.append(_timed(partial(module, x), x.device)[0])
        recompute, y = _timed(partial(module, x), x.device)
        recomputes.append(recompute)
        backward = partial(torch.autograd.grad, y, taken, torch.ones_like(y), allow_unused=True)
        backwards.append(_timed(backward, x.device)[0] if taken else 0.0)
    cost = UnitCost(
        unit.name,
        forward=statistics.median(forwards),
        recompute=statistics.median(recomputes),
        backward=statistics.median(backwards),
        parameter_bytes=sum(p.nbytes for p in module.parameters()),
        saved_bytes=saved.nbytes,
        input_bytes=x.nbytes,
    )
    return cost, y.detach()


def _timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    _synchronize(device)
    begin = time.perf_counter()
    result = work()
    _synchronize(device)
    return time.perf_counter() - begin, result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Saved:
    """Adds up the memory that a graph saves, each piece once, without parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._kept: list[Tensor] = []  # so that no address is given out twice
        self.nbytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._kept.append(tensor.detach())
            self.nbytes += storage.nbytes()
        return tensor
