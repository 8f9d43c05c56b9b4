"""Takes an optimizer's step in a few large pieces instead of a small one for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stalempi.flat import Flat
from stalempi.replica import Replica

__all__ = ["Stepper"]

# They treat every element alike and by itself, so that a step over joined memory gives the same bits.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
_OTHER_WAYS = ("foreach", "fused", "capturable", "differentiable")  # a group that asks for one gets it


@dataclass
class _Run:
    """Neighbours in a storage that are of one group of the optimizer; elements from `start` to `stop`.

    `members` are places of parameters, `joined` is all of them as one, `shared` the keys of state that they share.
    """

    storage: int
    start: int
    stop: int
    group: int
    members: list[int] = field(default_factory=list)
    joined: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.empty(0)))
    shared: list[str] = field(default_factory=list)


class Stepper:
    """Takes a replica's optimizer steps, with gradients that lie flat.

    On a CPU torch's optimizers spend about 10 microseconds on every parameter. Where the optimizer treats elements
    alike, another one of its class steps over whole runs of the flat storage instead. `optimizer.state` stays that of
    each parameter, as views of what the runs have, and is saved and loaded as ever.

    From the first step on in which some parameter has no gradient, every step is the optimizer's own.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica, self._optimizer = replica, replica.optimizer
        self._places = replica.params.places()
        self._may_join = self._is_elementwise()
        self._twin: torch.optim.Optimizer | None = None
        self._runs: list[_Run] = []
        self._joined_storages: Sequence[Tensor] = []
        self._gradients: dict[int, list[Tensor]] = {}

    def step(self, gradients: Flat, touched: NDArray[np.bool_], rows: Mapping[int, Tensor] | None = None) -> None:
        """Steps with `gradients`; those that are not `touched` are None to the optimizer, those in `rows` are sparse.

        The optimizer has the hyper-parameters of this step.
        """
        if self._may_join and touched.all():
            if self._twin or self._join():
                self._step_joined(gradients)
                return
        elif self._twin:
            self._part()
        self.show(gradients, touched)
        for place, numbers in (rows or {}).items():
            if touched[place]:
                self._show_rows(place, gradients.views[place], numbers)
        self._optimizer.step()

    def show(self, gradients: Flat, touched: NDArray[np.bool_]) -> None:
        """Makes `gradients` the parameters' own."""
        for parameter, view, has_gradient in zip(self._replica.trained, gradients.views, touched, strict=True):
            parameter.grad = view if has_gradient else None

    @torch.no_grad()
    def _show_rows(self, place: int, view: Tensor, rows: Tensor) -> None:
        self._replica.trained[place].grad = torch.sparse_coo_tensor(
            rows.unsqueeze(0), view[rows], view.shape, is_coalesced=True, check_invariants=False
        )
        view[rows] = 0  # who reads the next push into it knows its own rows only

    def _is_elementwise(self) -> bool:
        optimizer, storages = self._optimizer, self._replica.params.storages
        return (
            type(optimizer) in _ELEMENTWISE
            and not self._replica.sparse
            and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
            and not any(group.get(way) for group in optimizer.param_groups for way in _OTHER_WAYS)
            # elsewhere torch's default joins small steps itself, and bfloat16 rounds in other places
            and all(s.device.type == "cpu" and s.dtype in (torch.float32, torch.float64) for s in storages)
            and all(parameter.dim() for parameter in self._replica.trained)  # else state and counters look alike
        )

    def _join(self) -> bool:
        """Makes the runs, and the state of each run's members one; returns whether that can be."""
        self._runs = self._find_runs()
        self._point_at(self._replica.params.storages)
        states = [self._joined_state(run) for run in self._runs]
        self._may_join = all(state is not None for state in states)
        if not self._may_join:
            return False
        groups = [
            {**group, "params": [run.joined for run in self._runs if run.group == number]}
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        self._twin = type(self._optimizer)(groups)  # type: ignore[call-arg]
        for run, state in zip(self._runs, states, strict=True):
            if state:
                self._twin.state[run.joined] = state
        return True

    def _find_runs(self) -> list[_Run]:
        number = {id(p): n for n, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        runs: list[_Run] = []
        for place in sorted(range(len(self._places)), key=lambda place: self._places[place]):
            storage, start, stop = self._places[place]
            group = number[id(self._replica.trained[place])]
            if not runs or (runs[-1].storage, runs[-1].group) != (storage, group):
                runs.append(_Run(storage, start, stop, group))
            runs[-1].stop = stop
            runs[-1].members.append(place)
        return runs

    def _point_at(self, storages: Sequence[Tensor]) -> None:
        self._joined_storages = storages
        for run in self._runs:
            run.joined.data = storages[run.storage][run.start : run.stop]

    def _joined_state(self, run: _Run) -> dict[str, Any] | None:
        """Returns the members' states as one; None if they cannot be, for they are not of the same steps."""
        states = [self._optimizer.state.get(self._replica.trained[place], {}) for place in run.members]
        if any(state.keys() != states[0].keys() for state in states):
            return None
        found: dict[str, Any] = {}
        for key, first in states[0].items():
            values = [state[key] for state in states]
            if isinstance(first, Tensor) and first.dim():
                found[key] = torch.zeros(run.stop - run.start, dtype=first.dtype)
                for place, value in zip(run.members, values, strict=True):
                    self._part_of(found[key], run, place).copy_(value)
            elif all(bool(value == first) for value in values):
                found[key] = first
            else:
                return None
        return found

    def _part_of(self, joined: Tensor, run: _Run, place: int) -> Tensor:
        parameter = self._replica.trained[place]
        return joined.as_strided(parameter.shape, parameter.stride(), self._places[place][1] - run.start)

    def _step_joined(self, gradients: Flat) -> None:
        assert self._twin
        if self._joined_storages is not self._replica.params.storages:
            self._point_at(self._replica.params.storages)
        slices = self._gradients.get(id(gradients))
        if slices is None:
            slices = [gradients.storages[run.storage][run.start : run.stop] for run in self._runs]
            self._gradients[id(gradients)] = slices
        for run, gradient in zip(self._runs, slices, strict=True):
            run.joined.grad = gradient
        for ours, theirs in zip(self._twin.param_groups, self._optimizer.param_groups, strict=True):
            params = ours["params"]
            ours.update(theirs)
            ours["params"] = params
        self._twin.step()
        for run in self._runs:
            if len(self._twin.state[run.joined]) != len(run.shared):
                self._share(run, self._twin.state[run.joined])

    def _share(self, run: _Run, state: dict[str, Any]) -> None:
        """Gives each member its part of the run's state."""
        run.shared = list(state)
        for place in run.members:
            self._optimizer.state[self._replica.trained[place]] = {
                key: self._part_of(value, run, place) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.items()
            }

    def _part(self) -> None:
        """Goes back to the optimizer's own steps for good; counters become each parameter's own."""
        self._twin, self._may_join = None, False
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and not value.dim():
                    state[key] = value.clone()
