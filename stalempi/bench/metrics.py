"""Writes down what a run does while it goes on: JSON lines, TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from stalempi.errors import ConfigError
from stalempi.policy import Decision, Event
from stalempi.stats import RunStats, WorkerStats

__all__ = ["Board", "JsonLines", "Metrics", "Sink", "check_board", "open_sinks"]

Row = dict[str, Any]


class Sink(Protocol):
    """Takes a row of figures every so often."""

    def write(self, row: Row) -> None:
        """Writes `row` so that a run that is killed afterwards still has it."""

    def close(self) -> None:
        """Ends the file."""


class JsonLines:
    """One JSON object a line in `path`, which is written anew, or goes on where a run is resumed."""

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        self._file = path.open("a" if resumed else "w", encoding="utf-8")

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def check_board() -> None:
    """Raises ConfigError where TensorBoard is missing."""
    if find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs the package tensorboard: pip install 'stalempi[tensorboard]'")


class Board:
    """Event files for TensorBoard in `folder`; its step is the number of global samples."""

    def __init__(self, folder: Path) -> None:
        check_board()
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow to import

        self._writer = SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row["samples"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_sinks(lines: Path | None, board: Path | None, *, resumed: bool = False) -> list[Sink]:
    """Opens what was asked for; where a run is `resumed`, lines are added to those that are there."""
    found: list[Sink] = [JsonLines(lines, resumed=resumed)] if lines else []
    return [*found, Board(board)] if board else found


def _scalars(row: Row) -> dict[str, float]:
    flat = {key: value for key, value in row.items() if key not in ("workers", "samples")}
    for number, worker in enumerate(row.get("workers", ())):
        flat |= {f"worker {number}/{key}": value for key, value in worker.items()}
    return {key: value for key, value in flat.items() if value is not None}


class Metrics(AbstractContextManager["Metrics"]):
    """Gives its sinks a row every `every` seconds and one at the end; fits the server's `observe`.

    Means, shares and rates are of the time since the row before, counts and maxima of the run so far.

    Args:
        stats: the server's counts, read at each event.
        rate: the learning rate of the latest update.
        every: seconds between two rows.
        sinks: where rows go.
    """

    def __init__(
        self, stats: Callable[[], RunStats], rate: Callable[[], float], every: float, sinks: Sequence[Sink]
    ) -> None:
        self._stats, self._rate, self._every, self._sinks = stats, rate, every, sinks
        self._before: RunStats | None = None
        self._written = self._latest = 0.0

    def __call__(self, event: Event, decisions: list[Decision]) -> None:
        """Writes a row if it is time."""
        del decisions
        self._latest = event.now
        if event.now - (self._written or self._stats().started) >= self._every:
            self._write()

    def __exit__(self, *error: object) -> None:
        if self._latest > self._written:
            self._write()
        for sink in self._sinks:
            sink.close()

    def _write(self) -> None:
        now, stats = self._latest, self._stats()
        before = self._before or RunStats([WorkerStats() for _ in stats.workers])
        row = row_of(stats, before, seconds=now - (self._written or stats.started))
        row = {"seconds": now - stats.started, "lr": self._rate(), **row}
        for sink in self._sinks:
            sink.write(row)
        self._written = now
        self._before = replace(stats, workers=[replace(worker) for worker in stats.workers])


def row_of(stats: RunStats, before: RunStats, *, seconds: float) -> Row:
    """Returns the figures of the `seconds` between `before` and `stats`."""
    seconds = max(seconds, 1e-9)
    pairs = list(zip(stats.workers, before.workers, strict=True))

    def mean(of: str, by: str) -> float:
        gain = {name: sum(getattr(now, name) - getattr(then, name) for now, then in pairs) for name in (of, by)}
        return float(gain[of] / max(1, gain[by]))

    return {
        "samples": stats.samples,
        "updates": stats.updates,
        "loss": stats.loss if math.isfinite(stats.loss) else None,
        "samples_per_second": (stats.samples - before.samples) / seconds,
        "staleness_mean": mean("staleness_sum", "applied"),
        "staleness_max": max(worker.staleness_max for worker in stats.workers),
        "gap_mean": mean("gap_sum", "iterations"),
        "gap_max": max(worker.gap_max for worker in stats.workers),
        "workers": [_worker_row(now, then, seconds) for now, then in pairs],
    }


def _worker_row(now: WorkerStats, then: WorkerStats, seconds: float) -> Mapping[str, float]:
    return {
        "samples": now.samples,
        "samples_per_second": (now.samples - then.samples) / seconds,
        "wait_share": min(1.0, (now.waited - then.waited) / seconds),
    }
