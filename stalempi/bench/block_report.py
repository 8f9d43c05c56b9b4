"""Writes down how the run of a pipeline went: each block's actions, figures while it goes on, the table at its end."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.table import Table

from stalempi.bench.metrics import Sink
from stalempi.bench.progress import console
from stalempi.errors import ConfigError
from stalempi.logs import logger
from stalempi.pipeline.dryrun import Done
from stalempi.pipeline.pipeline import PipelineStats

__all__ = ["BlockProgress", "BlockTrace", "print_blocks"]

_SHOWN = logging.WARNING  # the rank that has the loss is not rank 0, and says no more than warnings by default


class BlockTrace(AbstractContextManager["BlockTrace"]):
    """Writes this block's actions to `path` as they are done, one JSON object a line; fits `Pipeline`'s `record`.

    Times are seconds from the start of the block's first action. The file is overwritten; a run that dies leaves whole
    lines.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--trace {path} cannot be written ({error.strerror}): choose another file") from None
        self._zero: float | None = None

    def __call__(self, done: Done) -> None:
        """Writes an action."""
        if self._zero is None:
            self._zero = done.begin
        row = {"block": done.block, "action": str(done.action)}
        row |= {"begin": round(done.begin - self._zero, 6), "end": round(done.end - self._zero, 6)}
        self._file.write(json.dumps(row) + "\n")

    def __exit__(self, *error: object) -> None:
        self._file.close()


class BlockProgress(AbstractContextManager["BlockProgress"]):
    """Says how far a run is, on the rank that knows the loss: a line and a row every so often, and a row at the end.

    Args:
        every: seconds from line to line.
        whole: global samples of a batch.
        total: global samples of the run.
        sinks: where rows go.
        seconds: returns how long the run has trained.
        rate: returns the learning rate of the latest update; None in a block that has nothing to train.
    """

    def __init__(
        self,
        every: float,
        whole: int,
        total: int,
        sinks: Sequence[Sink],
        *,
        seconds: Callable[[], float],
        rate: Callable[[], float | None],
    ) -> None:
        self._every, self._whole, self._total, self._sinks = every, whole, total, sinks
        self._seconds, self._rate = seconds, rate
        self._shown = time.monotonic()
        self._losses: list[float] = []
        self._samples = self._taken = 0

    def add(self, samples: int, loss: float | None) -> None:
        """Takes in that the run has done so many global samples, and the loss of the batch that came through."""
        self._samples = samples
        self._taken += self._whole
        self._losses += [] if loss is None else [loss]
        if time.monotonic() - self._shown >= self._every and self._losses:
            self._show()

    def __exit__(self, *error: object) -> None:
        if self._taken:
            self._write(*self._figures())
        for sink in self._sinks:
            sink.close()

    def _show(self) -> None:
        speed, loss = self._figures()
        left = (self._total - self._samples) / speed
        said = "%d/%d samples  loss %.4f  %.0f samples/s  %.0f s left"
        logger.log(_SHOWN, said, self._samples, self._total, loss, speed, left)
        self._write(speed, loss)
        self._shown, self._taken = time.monotonic(), 0
        self._losses.clear()

    def _figures(self) -> tuple[float, float]:
        """Returns samples a second and the mean loss since the line before."""
        seconds = max(time.monotonic() - self._shown, 1e-9)
        return self._taken / seconds, sum(self._losses) / len(self._losses) if self._losses else math.nan

    def _write(self, speed: float, loss: float) -> None:
        row = {
            "seconds": self._seconds(),
            "samples": self._samples,
            "lr": self._rate(),
            "loss": loss if math.isfinite(loss) else None,
            "samples_per_second": speed,
        }
        for sink in self._sinks:
            sink.write(row)


def print_blocks(told: list[PipelineStats], seconds: float) -> None:
    """Prints a row per block to stdout."""
    table = Table(box=None, pad_edge=False)
    for heading in ("block", "steps", "updates", "waiting", "staleness", "held", "versions"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stats in told:
        steady = max(stats.staleness, key=lambda updates: stats.staleness[updates], default=0)
        name = f"{stats.block}" + (f" of copy {stats.replica}" if stats.replica else "")
        waiting = f"{100 * stats.waited / max(seconds, 1e-9):.0f}%"
        row = (name, stats.steps, stats.updates, waiting, steady, stats.most_held, stats.versions)
        table.add_row(*map(str, row))
    console(sys.stdout).print(table, highlight=False)
