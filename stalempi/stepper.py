"""Takes an optimizer's step over joined memory, bucket by bucket, instead of parameter by parameter."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stalempi.flat import Bucket, Flat
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

    `members` are places of parameters, `shared` the keys of the state that they are views of.
    """

    storage: int
    start: int
    stop: int
    group: int
    members: list[int] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)


@dataclass
class _Piece:
    """The part of a run that lies in one bucket, elements from `start` to `stop`; `joined` is it as one parameter."""

    run: _Run
    start: int
    stop: int
    joined: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.empty(0)))

    def of(self, values: Tensor) -> Tensor:
        """Returns this piece of `values`, which are as long as the run."""
        return values[self.start - self.run.start : self.stop - self.run.start]


class Stepper:
    """Takes a replica's optimizer steps, with gradients that lie flat.

    On a CPU torch's optimizers spend about 10 microseconds on every parameter, and walk through all memory several
    times. Where the optimizer treats elements alike, another one of its class steps over whole buckets of the flat
    storage instead, one after the other, each of which fits in a cache and may be released while the next one is
    stepped. `optimizer.state` stays that of each parameter, as views of what the runs have, and is saved and loaded as
    ever.

    From the first step on in which some parameter has no gradient, every step is the optimizer's own.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica, self._optimizer = replica, replica.optimizer
        self._places = replica.params.places()
        self._buckets = replica.release_buckets()
        self._may_join = self._is_elementwise()
        self._twin: torch.optim.Optimizer | None = None
        self._runs: list[_Run] = []
        self._pieces: list[list[_Piece]] = []  # of each bucket
        self._joined_storages: Sequence[Tensor] = []
        self._gradients: dict[int, list[Tensor]] = {}

    def step(
        self,
        gradients: Flat,
        touched: NDArray[np.bool_],
        rows: Mapping[int, Tensor] | None = None,
        *,
        before: Callable[[Bucket | None], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Steps with `gradients`; those that are not `touched` are None to the optimizer, those in `rows` are sparse.

        The optimizer has the hyper-parameters of this step. `before` is called ahead of each bucket's step, with the
        bucket, or ahead of the whole one with None; `after` with the place of each bucket whose step is made, in the
        order of a release, if the step is made `in_buckets`.
        """
        if self.in_buckets(touched):
            self._step_joined(gradients, before, after)
            return
        if before:
            before(None)
        self.show(gradients, touched)
        for place, numbers in (rows or {}).items():
            if touched[place]:
                self._show_rows(place, gradients.views[place], numbers)
        self._optimizer.step()

    def in_buckets(self, touched: NDArray[np.bool_]) -> bool:
        """Returns whether the next step, with gradients for the parameters `touched`, is made bucket by bucket."""
        if self._may_join and touched.all():
            return self._twin is not None or self._join()
        if self._twin:
            self._part()
        return False

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
        self._pieces = [self._cut(bucket) for bucket in self._buckets]
        self._runs = [run for run in self._runs if run.pieces]  # all parameters of one may be empty
        self._point_at(self._replica.params.storages)
        states = [self._joined_state(run) for run in self._runs]
        self._may_join = all(state is not None for state in states)
        if not self._may_join:
            return False
        groups = [
            {**group, "params": [piece.joined for run in self._runs if run.group == number for piece in run.pieces]}
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        self._twin = type(self._optimizer)(groups)  # type: ignore[call-arg]
        self._twin_step = inspect.unwrap(type(self._twin).step)  # hooks and profiling cost as much as a small step
        for run, state in zip(self._runs, states, strict=True):
            for piece in run.pieces if state else ():
                self._twin.state[piece.joined] = _of(piece, state or {})
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

    def _cut(self, bucket: Bucket) -> list[_Piece]:
        """Returns the pieces of runs that lie in a bucket."""
        itemsize = self._replica.params.storages[bucket.storage].itemsize
        first, last = bucket.start // itemsize, bucket.stop // itemsize
        found = []
        for run in self._runs:
            start, stop = max(run.start, first), min(run.stop, last)
            if run.storage == bucket.storage and start < stop:
                found.append(_Piece(run, start, stop))
                run.pieces.append(found[-1])
        return found

    def _point_at(self, storages: Sequence[Tensor]) -> None:
        self._joined_storages = storages
        for piece in itertools.chain.from_iterable(self._pieces):
            piece.joined.data = storages[piece.run.storage][piece.start : piece.stop]

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

    def _step_joined(
        self, gradients: Flat, before: Callable[[Bucket | None], None] | None, after: Callable[[int], None] | None
    ) -> None:
        assert self._twin
        if self._joined_storages is not self._replica.params.storages:
            self._point_at(self._replica.params.storages)
        slices = iter(self._slices(gradients))
        groups = self._twin.param_groups
        for ours, theirs in zip(groups, self._optimizer.param_groups, strict=True):
            ours.update(theirs, foreach=False)  # said, torch need not find it out at each step
        with torch.no_grad():
            for place, pieces in enumerate(self._pieces):
                if before:
                    before(self._buckets[place])
                for piece in pieces:
                    self._step_piece(piece, next(slices), groups[piece.run.group])
                if after:
                    after(place)
        self._twin.param_groups = groups
        for run in self._runs:
            if len(self._twin.state[run.pieces[0].joined]) != len(run.shared):
                self._share(run)

    def _step_piece(self, piece: _Piece, gradient: Tensor, group: dict[str, Any]) -> None:
        assert self._twin
        piece.joined.grad = gradient
        group["params"] = [piece.joined]
        self._twin.param_groups = [group]
        self._twin_step(self._twin)

    def _slices(self, gradients: Flat) -> list[Tensor]:
        """Returns the gradients of all pieces, in their order."""
        slices = self._gradients.get(id(gradients))
        if slices is None:
            pieces = itertools.chain.from_iterable(self._pieces)
            slices = [gradients.storages[piece.run.storage][piece.start : piece.stop] for piece in pieces]
            self._gradients[id(gradients)] = slices
        return slices

    def _share(self, run: _Run) -> None:
        """Makes the state of the pieces, and that of each member, parts of the run's."""
        assert self._twin
        states = [self._twin.state[piece.joined] for piece in run.pieces]
        shared: dict[str, Any] = {}
        for key, first in states[0].items():
            if isinstance(first, Tensor) and first.dim():
                shared[key] = torch.cat([state[key] for state in states])
            else:
                shared[key] = first
        for piece, state in zip(run.pieces, states, strict=True):
            state.update({key: piece.of(v) for key, v in shared.items() if isinstance(v, Tensor) and v.dim()})
        run.shared = list(shared)
        for place in run.members:
            self._optimizer.state[self._replica.trained[place]] = {
                key: self._part_of(value, run, place) if isinstance(value, Tensor) and value.dim() else value
                for key, value in shared.items()
            }

    def _part(self) -> None:
        """Goes back to the optimizer's own steps for good; counters become each parameter's own."""
        self._twin, self._may_join = None, False
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and not value.dim():
                    state[key] = value.clone()


def _of(piece: _Piece, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a piece's own part of its run's state; a counter is counted by each piece for itself."""
    return {
        key: (piece.of(value) if value.dim() else value.clone()) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }
