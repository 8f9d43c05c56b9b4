"""Holds how the command trains: optimizer, learning rate over time, precision, what is done to gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click
import torch
from torch import nn

from stalempi.bench.options import FiniteRange, parse_shares
from stalempi.errors import ConfigError
from stalempi.policy import BSP, Policy
from stalempi.train.groups import decay_groups
from stalempi.train.schedule import Constant, Cosine, Schedule, StepDecay, Warmup

__all__ = ["Recipe", "recipe_from", "recipe_options"]

F = TypeVar("F", bound=Callable[..., Any])

DECAY = "0.667,0.833"
INITIAL = 0.1  # a warm-up begins at this share of the rate, or at the unscaled rate with --scale-lr

_positive = FiniteRange(min=0, min_open=True)
_count = click.IntRange(min=1)


@dataclass(frozen=True)
class Recipe:
    """How the model is trained; see the command's help."""

    optimizer: str
    lr: float
    momentum: float
    weight_decay: float
    no_decay_norm: bool
    schedule: str
    lr_decay: tuple[float, ...]
    lr_decay_factor: float
    warmup: float
    scale_lr: bool
    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    nonfinite: str
    amp: str

    def __post_init__(self) -> None:
        self.factor(1_000_000, 1)
        if self.amp == "fp16" and not hasattr(torch.amp, "GradScaler"):
            raise ConfigError(f"--amp fp16 needs torch 2.3 or later, this is {torch.__version__}: take --amp bf16")

    def batches_per_update(self, policy: Policy, num_workers: int, group: int = 1) -> int:
        """Returns how many batches of one rank an update stands for.

        Under BSP and allreduce those of all workers (backup workers aside), under the other policies one worker's; each
        has --accumulate of each of its `group` ranks.
        """
        workers = 1
        if isinstance(policy, BSP):
            workers = num_workers - policy.backup
        elif not policy.has_server:
            workers = num_workers
        return self.accumulate * group * workers

    def scale(self, policy: Policy, num_workers: int, group: int = 1) -> int:
        """Returns what --lr is multiplied by: the linear scaling rule of Goyal et al. 2017, section 2.1."""
        return self.batches_per_update(policy, num_workers, group) if self.scale_lr else 1

    def factor(self, total: int, scale: int) -> Schedule:
        """Returns the learning rate's factor over `total` global samples, for a rate that was scaled by `scale`."""
        length = round(self.warmup * total)
        if self.schedule == "cosine":
            shape: Schedule = Cosine(total, start=length)
        elif self.schedule == "step" and self.lr_decay:
            shape = StepDecay(total, self.lr_decay, self.lr_decay_factor)
        else:
            shape = Constant()
        return Warmup(length, 1 / scale if scale > 1 else INITIAL) * shape if length else shape

    def make_optimizer(self, model: nn.Module, scale: int) -> torch.optim.Optimizer:
        """Makes the torch optimizer, its rate multiplied by `scale`."""
        parameters: Any = decay_groups(model, self.weight_decay) if self.no_decay_norm else model.parameters()
        return self._optimizer(parameters, self.lr * scale)

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Makes the torch optimizer of some parameters, of which biases and norms are known by their one dimension."""
        if not self.no_decay_norm:
            return self._optimizer(list(parameters), self.lr)
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in parameters:
            groups[parameter.dim() > 1].append(parameter)
        decays = {True: self.weight_decay, False: 0.0}
        return self._optimizer([{"params": p, "weight_decay": decays[k]} for k, p in groups.items() if p], self.lr)

    def _optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        decay = self.weight_decay
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=lr, weight_decay=decay)
        return torch.optim.SGD(parameters, lr=lr, momentum=self.momentum, weight_decay=decay)


def recipe_options(function: F) -> F:
    """Adds the options of a recipe to a click command."""
    for option in reversed(
        (
            click.option("--optimizer", type=click.Choice(["sgd", "adam"]), default="sgd", show_default=True),
            click.option("--lr", type=_positive, default=0.02, show_default=True),
            click.option("--momentum", type=FiniteRange(min=0, max=1, max_open=True), default=0.5, show_default=True),
            click.option("--weight-decay", type=FiniteRange(min=0), default=0.0, show_default=True),
            click.option("--no-decay-norm", is_flag=True, help="No weight decay of biases and normalisation layers."),
            click.option(
                "--schedule",
                type=click.Choice(["step", "cosine", "constant"]),
                default="step",
                show_default=True,
                help="Learning rate as a function of global samples.",
            ),
            click.option("--lr-decay", help=f'step: shares of the global samples; "" for none [default: {DECAY}].'),
            click.option("--lr-decay-factor", type=_positive, default=0.1, show_default=True, help="step: at each."),
            click.option(
                "--warmup",
                type=FiniteRange(min=0, max=1, max_open=True),
                default=0.0,
                help="Share of the global samples over which the rate rises to its value.",
            ),
            click.option(
                "--scale-lr",
                is_flag=True,
                help="Multiply --lr by the batches that an update stands for: --accumulate, and under bsp times the "
                "workers.",
            ),
            click.option(
                "--accumulate",
                type=_count,
                default=1,
                show_default=True,
                help="Batches in one push; of a pipeline, in one update.",
            ),
            click.option(
                "--clip-norm",
                type=_positive,
                help="Largest norm of a gradient that is applied; of a pipeline, of each block's.",
            ),
            click.option("--clip-value", type=_positive, help="Largest magnitude of an element of it."),
            click.option(
                "--nonfinite",
                type=click.Choice(["raise", "skip"]),
                default="raise",
                show_default=True,
                help="A gradient with NaN or infinity ends the job, or is counted and left out.",
            ),
            click.option(
                "--amp",
                type=click.Choice(["off", "bf16", "fp16"]),
                default="off",
                show_default=True,
                help="Precision to compute in; fp16 with a gradient scaler, in a pipeline with --loss-scale.",
            ),
        )
    ):
        function = option(function)
    return function


def recipe_from(words: dict[str, Any]) -> Recipe:
    """Takes the recipe's options out of a command's parameters; ConfigError if they do not fit together."""
    given = words.pop("lr_decay")
    if given and words["schedule"] != "step":
        raise ConfigError(f"--lr-decay is of --schedule step, not of {words['schedule']}: leave one of them out")
    words["lr_decay"] = parse_shares(DECAY if given is None else given)
    return Recipe(**{field.name: words.pop(field.name) for field in fields(Recipe)})
