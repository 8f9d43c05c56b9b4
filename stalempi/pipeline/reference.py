"""Runs a schedule's actions on all blocks in one process, without MPI: what a run over MPI has to equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.block import Loss
from stalempi.pipeline.build import BlockOptions, Ends, MakeOptimizer, Shared, build_runner
from stalempi.pipeline.dryrun import Done
from stalempi.pipeline.link import LocalLink
from stalempi.pipeline.runner import Neighbour
from stalempi.pipeline.schedules import Schedule
from stalempi.pipeline.split import Tie

__all__ = ["Reference"]


class Reference:
    """All blocks of a pipeline in one process, each going on whenever the message that it needs next is there.

    Args:
        modules: the blocks, from the data to the loss.
        schedule: the method.
        optimizer: makes the optimizer of a block's parameters.
        loss: `loss(output, labels)`, a mean over samples.
        ties: the parameters that two blocks share, as `split` found them.
        options: see `BlockOptions`.
        record: called with every action that is done.

    Attributes:
        runners: one for each block.
    """

    def __init__(  # noqa: PLR0913 - the twin of a Pipeline
        self,
        modules: Sequence[nn.Module],
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        *,
        ties: Sequence[Tie] = (),
        options: BlockOptions | None = None,
        record: Callable[[Done], None] | None = None,
    ) -> None:
        blocks = len(modules)
        schedule.check(blocks)
        up = [LocalLink(f"block {k}") for k in range(blocks - 1)]
        down = [LocalLink(f"block {k + 1}") for k in range(blocks - 1)]
        shared, across = Shared.of(ties), dict[int, Neighbour]()
        if shared:
            rise, fall = LocalLink(f"block {shared.lower}"), LocalLink(f"block {shared.upper}")
            across[shared.lower] = Neighbour(sends=rise, receives=fall)
            across[shared.upper] = Neighbour(sends=fall, receives=rise)
        self.runners = [
            build_runner(
                module,
                k,
                blocks,
                schedule,
                optimizer,
                Ends(
                    below=Neighbour(sends=down[k - 1], receives=up[k - 1]) if k > 0 else None,
                    above=Neighbour(sends=up[k], receives=down[k]) if k < blocks - 1 else None,
                    tie=shared.options(k, across[k], schedule, blocks) if shared and k in across else None,
                ),
                loss=loss,
                options=options or BlockOptions(),
                record=record,
            )
            for k, module in enumerate(modules)
        ]

    def step(self, x: Tensor, y: Tensor) -> None:
        """Lets a batch in, and does what can be done."""
        for runner in self.runners:
            runner.add_step((x,), (y,))
        self._advance()

    def drain(self) -> None:
        """Finishes the batches that are inside."""
        for runner in self.runners:
            runner.add_drain()
        self._advance()
        if not all(runner.idle for runner in self.runners):
            raise ConfigError("the schedule deadlocks: play it with stalempi.pipeline.dryrun to see where")
        for runner in self.runners:
            runner.restart()

    def evaluate(self, x: Tensor) -> Tensor:
        """Returns the output of the whole model in evaluation mode."""
        values: tuple[Tensor, ...] = (x,)
        for runner in self.runners:
            values = runner.block.evaluate(values)
        return values[0]

    def _advance(self) -> None:
        moved = True
        while moved:
            moved = sum(runner.advance(wait=False) for runner in self.runners) > 0
