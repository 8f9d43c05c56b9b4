"""Puts one block of a pipeline together, the same over MPI and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stalempi.pipeline.block import Block, Loss
from stalempi.pipeline.dryrun import Done
from stalempi.pipeline.link import Receiver, Sender
from stalempi.pipeline.predictor import Predictor
from stalempi.pipeline.runner import Neighbour, Runner, Stretch
from stalempi.pipeline.schedules import Schedule
from stalempi.pipeline.update import UpdateOptions, Updater

__all__ = ["BlockOptions", "Ends", "MakeOptimizer", "build_runner"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class BlockOptions:
    """How every block computes and is updated; see `Block` and `UpdateOptions`."""

    running_stats: str = "recompute"
    autocast: torch.dtype | None = None
    seed: int = 0
    update: UpdateOptions = field(default_factory=UpdateOptions)


@dataclass(frozen=True)
class Ends:
    """What joins a block to the others; see `Runner` and `Updater`."""

    below: Neighbour | None = None
    above: Neighbour | None = None
    labels: Receiver | None = None
    labels_out: Sender | None = None
    agree: Callable[[list[Tensor], int], int] | None = None


def build_runner(  # noqa: PLR0913 - made in two places
    module: nn.Module,
    number: int,
    blocks: int,
    schedule: Schedule,
    optimizer: MakeOptimizer,
    ends: Ends,
    *,
    loss: Loss | None,
    options: BlockOptions,
    stretch: Stretch | None = None,
    record: Callable[[Done], None] | None = None,
    progress: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Runner:
    """Puts block `number` of `blocks` together, in training mode; `loss` is used by the last one.

    `progress` keeps messages moving during a computation.
    """
    module.train()
    trained = [p for p in module.parameters() if p.requires_grad]
    updater = Updater(module, optimizer(trained) if trained else None, options.update, agree=ends.agree)
    block = Block(
        module,
        number,
        blocks,
        schedule,
        updater,
        loss=loss if number == blocks - 1 else None,
        running_stats=options.running_stats,
        autocast=options.autocast,
        seed=options.seed,
    )
    guess = Predictor(options.seed + number) if schedule.predicts and number < blocks - 1 else None
    return Runner(
        block,
        schedule,
        below=ends.below,
        above=ends.above,
        labels=ends.labels,
        labels_out=ends.labels_out,
        predictor=guess,
        stretch=stretch,
        record=record,
        progress=progress,
    )
