"""Puts one block of a pipeline together, the same over MPI and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.block import Block, Loss
from stalempi.pipeline.dryrun import Done
from stalempi.pipeline.link import MAX_TENSORS, Receiver, Sender
from stalempi.pipeline.predictor import Predictor
from stalempi.pipeline.runner import Neighbour, Runner, Stretch
from stalempi.pipeline.schedules import Schedule
from stalempi.pipeline.split import Tie
from stalempi.pipeline.tied import TiedEnd
from stalempi.pipeline.update import UpdateOptions, Updater, trained

__all__ = ["BlockOptions", "Ends", "MakeOptimizer", "Shared", "TieOptions", "build_runner"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class BlockOptions:
    """How every block computes and is updated; see `Block` and `UpdateOptions`."""

    running_stats: str = "recompute"
    autocast: torch.dtype | None = None
    seed: int = 0
    update: UpdateOptions = field(default_factory=UpdateOptions)


@dataclass(frozen=True)
class TieOptions:
    """The parameters that this block and another one share; see `TiedEnd`.

    Attributes:
        names: of the parameters in this block.
        link: to the other block.
    """

    names: Sequence[str]
    link: Neighbour
    is_lower: bool
    lag: int


@dataclass(frozen=True)
class Shared:
    """Parameters that two blocks share: their names in the lower and in the upper one."""

    lower: int
    upper: int
    lower_names: tuple[str, ...]
    upper_names: tuple[str, ...]

    @classmethod
    def of(cls, ties: Sequence[Tie]) -> Shared | None:
        """Joins the ties of a model, all between the same two blocks; None if there is none.

        Raises ConfigError if there are other ties, which cannot be trained.
        """
        if not ties:
            return None
        pairs = {tuple(sorted(set(tie.blocks))) for tie in ties}
        names = ", ".join(tie.keys[0] for tie in ties)
        if len(pairs) > 1 or len(min(pairs)) != 2:
            raise ConfigError(f"parameters can be shared by two blocks, the same for all: {names}; cut elsewhere")
        if len(ties) > MAX_TENSORS:
            raise ConfigError(f"at most {MAX_TENSORS} parameters can be shared by two blocks: {names}; cut elsewhere")
        lower, upper = min(pairs)
        own = [[tie.keys[tie.blocks.index(block)] for tie in ties] for block in (lower, upper)]
        return cls(lower, upper, tuple(own[0]), tuple(own[1]))

    def options(self, block: int, link: Neighbour, schedule: Schedule, blocks: int) -> TieOptions:
        """Returns what `block`, one of the two, has to know."""
        is_lower = block == self.lower
        return TieOptions(
            self.lower_names if is_lower else self.upper_names, link, is_lower, self.lag(schedule, blocks)
        )

    def lag(self, schedule: Schedule, blocks: int) -> int:
        """Returns the updates by which the upper block takes a step of them later than one of its own."""
        return max(0, schedule.staleness(self.lower, blocks) - schedule.staleness(self.upper, blocks))


@dataclass(frozen=True)
class Ends:
    """What joins a block to the others; see `Runner` and `Updater`."""

    below: Neighbour | None = None
    above: Neighbour | None = None
    labels: Receiver | None = None
    labels_out: Sender | None = None
    agree: Callable[[list[Tensor], int], int] | None = None
    tie: TieOptions | None = None


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
    """Puts block `number` of `blocks` together; `loss` is used by the last one.

    Its modules stay in the modes that they are in. `progress` keeps messages moving during a computation.
    """
    parameters = trained(module)
    apart = ends.tie.names if ends.tie else ()
    own = [p for name, p in parameters.items() if name not in apart]
    updater = Updater(parameters, optimizer(own) if own else None, options.update, agree=ends.agree)
    tied = ends.tie and TiedEnd(apart, updater, optimizer, is_lower=ends.tie.is_lower, lag=ends.tie.lag)
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
        tied=(tied, ends.tie.link) if tied and ends.tie else None,
        predictor=guess,
        stretch=stretch,
        record=record,
        progress=progress,
    )
