"""Mends stale gradients on the server before they are applied; opt-in, since each costs memory or fidelity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from stalempi.errors import ConfigError
from stalempi.flat import Flat
from stalempi.replica import Replica

__all__ = ["CORRECTIONS", "Correction", "DelayCompensation", "GapAware", "StalenessRate", "make_correction"]


class Correction(ABC):
    """Changes a gradient by what happened to the parameters since the worker got them.

    `start` binds it to a server, which then calls `released` at each release, `correct` before each update for each
    gradient in it, and `updated` after it.
    """

    name: ClassVar[str]

    def start(self, replica: Replica, num_workers: int) -> None:
        """Takes the memory that it needs for `num_workers` workers of `replica`."""
        self._replica = replica

    @property
    def nbytes(self) -> int:
        """Bytes that it holds beyond what the server needs anyway."""
        return 0

    def released(self, worker: int) -> None:
        """Takes note of the parameters that `worker` is going to compute on."""
        return

    @abstractmethod
    def correct(self, worker: int, gradients: Flat, staleness: int) -> float:
        """Changes `gradients` of `worker` in place and returns a factor for the learning rate of this update."""

    def updated(self) -> None:
        """Takes note of the update just made."""
        return

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it: numbers and its own tensors, not copied.

        What workers were given is not in it: whoever resumes gives all of them the present parameters.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from a `state`, `start` having been called."""
        return


class StalenessRate(Correction):
    """Divides the learning rate by the staleness: lr / max(1, tau).

    Source: Zhang et al. 2015, staleness-aware async-SGD (papers.md section 5 item 1). The rate is divided and not
    the gradient, so that it means the same under momentum and under Adam.
    """

    name: ClassVar[str] = "rate"

    def correct(self, worker: int, gradients: Flat, staleness: int) -> float:
        """Returns 1 / max(1, staleness); leaves the gradient alone."""
        return 1.0 / max(1, staleness)


class _Snapshots(Correction):
    """Keeps for each worker the parameters it computes on: num_workers times the parameters."""

    def start(self, replica: Replica, num_workers: int) -> None:
        """Copies the first parameters for every worker."""
        super().start(replica, num_workers)
        self._given = [replica.params.like() for _ in range(num_workers)]
        for worker in range(num_workers):
            self.released(worker)

    @property
    def nbytes(self) -> int:
        """The snapshots."""
        return sum(flat.nbytes for flat in self._given)

    @torch.no_grad()
    def released(self, worker: int) -> None:
        """Copies the present parameters."""
        for mine, now in zip(self._given[worker].storages, self._replica.params.storages, strict=True):
            mine.copy_(now)


class DelayCompensation(_Snapshots):
    """Adds a cheap approximation of the curvature times the way gone: g + lambda * g * g * (w_now - w_given).

    Args:
        strength: lambda.
        adaptive: lambda / sqrt(MS + 1e-7) by element, MS a running mean of g * g with weight 0.95, bias-corrected
            (without that the first corrections are 4.5 times too strong, and diverge).

    Source: DC-ASGD (papers.md section 5 item 2). w_given is what this very worker computed on; one for all
    workers would be wrong.
    """

    name: ClassVar[str] = "dc-asgd"

    def __init__(self, strength: float = 0.04, *, adaptive: bool = False) -> None:
        if not strength >= 0:
            raise ConfigError(f"strength must be at least 0, got {strength}")
        self._strength, self._adaptive = strength, adaptive

    def start(self, replica: Replica, num_workers: int) -> None:
        """Takes the snapshots, and the running mean square where it is adaptive."""
        super().start(replica, num_workers)
        self._mean_square = replica.params.like() if self._adaptive else None
        self._seen = 0

    @property
    def nbytes(self) -> int:
        """The snapshots and the running mean square."""
        return super().nbytes + (self._mean_square.nbytes if self._mean_square else 0)

    def state(self) -> dict[str, Any]:
        """Returns the running mean square."""
        return {"seen": self._seen, "mean_square": self._mean_square.storages if self._mean_square else []}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on with the running mean square of a `state`."""
        self._seen = int(state["seen"])
        _copy(state["mean_square"], self._mean_square.storages if self._mean_square else [])

    @torch.no_grad()
    def correct(self, worker: int, gradients: Flat, staleness: int) -> float:
        """Compensates in place; the rate stays."""
        now, given = self._replica.params.storages, self._given[worker].storages
        self._seen += 1
        for number, g in enumerate(gradients.storages):
            square = g * g
            extra = square * (now[number] - given[number])
            if self._mean_square:
                mean = self._mean_square.storages[number]
                mean.mul_(0.95).add_(square, alpha=0.05)
                extra /= (mean / (1.0 - 0.95**self._seen) + 1e-7).sqrt()
            g.add_(extra, alpha=self._strength)
        return 1.0


class GapAware(_Snapshots):
    """Divides each element by how far, in usual steps, its parameter has moved: g / (1 + |w_now - w_given| / C).

    C = max_lr * rms of (step / lr), an exponential mean over updates with weight 0.999, bias-corrected, by element.

    Source: Gap-Aware, arXiv 1909.10802 (papers.md section 5 item 3). The step is measured (the change of the
    parameter divided by the rate), so that any optimizer will do, not only momentum SGD. It costs two more copies of
    the parameters than the snapshots.
    """

    name: ClassVar[str] = "gap-aware"
    _KEEP = 0.999

    def start(self, replica: Replica, num_workers: int) -> None:
        """Takes the snapshots, the mean square step, and a copy to measure steps with."""
        super().start(replica, num_workers)
        self._mean_square, self._before = replica.params.like(), replica.params.like()
        self._updates, self._max_lr = 0, 0.0
        self._remember()

    @property
    def nbytes(self) -> int:
        """The snapshots and two copies of the parameters."""
        return super().nbytes + self._mean_square.nbytes + self._before.nbytes

    def state(self) -> dict[str, Any]:
        """Returns the mean square step."""
        mean = self._mean_square.storages
        return {"updates": self._updates, "max_lr": self._max_lr, "mean_square": mean}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on with the mean square step of a `state`."""
        self._updates, self._max_lr = int(state["updates"]), float(state["max_lr"])
        _copy(state["mean_square"], self._mean_square.storages)

    @torch.no_grad()
    def correct(self, worker: int, gradients: Flat, staleness: int) -> float:
        """Divides in place; the rate stays."""
        if not self._updates:
            return 1.0
        unbias = 1.0 - self._KEEP**self._updates
        all_of_it = (gradients, self._replica.params, self._given[worker], self._mean_square)
        for g, now, given, mean in zip(*(flat.storages for flat in all_of_it), strict=True):
            usual = (mean / unbias).sqrt_().mul_(self._max_lr).add_(1e-12)
            g.div_((now - given).abs_().div_(usual).add_(1.0))
        return 1.0

    @torch.no_grad()
    def updated(self) -> None:
        """Measures the step of each parameter, by the rate of its group."""
        rates = {id(p): float(group["lr"]) for group in self._replica.optimizer.param_groups for p in group["params"]}
        self._max_lr = max(self._max_lr, *rates.values())
        self._updates += 1
        places = zip(self._replica.trained, self._before.views, self._mean_square.views, strict=True)
        for parameter, before, mean in places:
            step = (parameter.detach() - before) / max(rates[id(parameter)], 1e-12)
            mean.mul_(self._KEEP).addcmul_(step, step, value=1.0 - self._KEEP)
        self._remember()

    def _remember(self) -> None:
        for before, now in zip(self._before.storages, self._replica.params.storages, strict=True):
            before.copy_(now)


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    for a, b in zip(source, target, strict=True):
        b.copy_(a)


CORRECTIONS = ("none", "rate", "dc-asgd", "dc-asgd-adaptive", "gap-aware")


def make_correction(name: str) -> Correction | None:
    """Returns the correction called `name`, one of CORRECTIONS, with its usual settings; ConfigError otherwise."""
    match name:
        case "none":
            return None
        case "rate":
            return StalenessRate()
        case "dc-asgd":
            return DelayCompensation()
        case "dc-asgd-adaptive":
            return DelayCompensation(2.0, adaptive=True)
        case "gap-aware":
            return GapAware()
    raise ConfigError(f"correction must be one of {', '.join(CORRECTIONS)}, got {name!r}")
