"""Runs one rank of stalempi-bench pipeline."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
import torch
from rich.table import Table
from torch import nn

import stalempi
from stalempi import preempt
from stalempi.bench.choice import Choice
from stalempi.bench.feed import Feed
from stalempi.bench.metrics import Sink, check_board, open_sinks
from stalempi.bench.pace import BlockPace
from stalempi.bench.progress import console
from stalempi.bench.recipe import Recipe
from stalempi.bench.report import check_writable, environment, write_json
from stalempi.context import Context
from stalempi.errors import ConfigError
from stalempi.logs import log_to_stderr, logger
from stalempi.pipeline.actions import Op
from stalempi.pipeline.dryrun import Done
from stalempi.pipeline.pipeline import Pipeline, PipelineStats
from stalempi.pipeline.schedules import Schedule
from stalempi.train.checkpoint import CheckpointStore
from stalempi.train.data import Data
from stalempi.train.evaluate import Point
from stalempi.train.keeper import Checkpoint
from stalempi.train.loss import cross_entropy

__all__ = ["PipelineOptions", "run_block"]

_SHOWN = logging.WARNING  # the rank that has the loss is not rank 0, and says no more than warnings by default
_PRECISIONS = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PipelineOptions:
    """What the user asked for; see the command's help."""

    method: Callable[[int], Schedule]
    choice: Choice
    recipe: Recipe
    replicas: int
    split: tuple[int, ...] | tuple[str, ...] | None
    meta: bool
    epochs: int
    samples: int | None
    batch_size: int
    running_stats: str
    loss_scale: float
    device: str | None
    slow: tuple[str, ...]
    pace: Callable[[int], BlockPace]
    evaluate_every: int | None
    stall_timeout: float | None
    checkpoint: Checkpoint | None
    grace: float
    trace: Path | None
    log_interval: float
    log_level: str | None
    metrics: Path | None
    tensorboard: Path | None
    out: Path | None

    def report(self) -> dict[str, Any]:
        """Returns the options as result.json holds them."""
        left_out = ("method", "choice", "recipe", "pace", "checkpoint")
        plain = {key: value for key, value in self.__dict__.items() if key not in left_out}
        plain |= {"checkpoint": str(self.checkpoint) if self.checkpoint else None}
        plain |= asdict(self.choice) | asdict(self.recipe)
        return {key: str(value) if isinstance(value, Path) else value for key, value in plain.items()}

    def __post_init__(self) -> None:
        if self.tensorboard is not None:
            check_board()

    def block_options(self, total: int) -> stalempi.BlockOptions:
        """Returns how the blocks of a run of `total` global samples compute and are updated."""
        recipe = self.recipe
        update = stalempi.UpdateOptions(
            clip_norm=recipe.clip_norm,
            clip_value=recipe.clip_value,
            loss_scale=self.loss_scale if recipe.amp == "fp16" else 1.0,
            schedule=recipe.factor(total, 1),
        )
        autocast = _PRECISIONS[recipe.amp]
        return stalempi.BlockOptions(self.running_stats, autocast, self.choice.seed, update)


def run_block(options: PipelineOptions, ranks: int | None) -> None:
    """Trains this rank's block; `ranks` is what the user expects, if they said."""
    context = stalempi.init(device=options.device, pipeline=True, grace=options.grace)
    if ranks not in (None, context.size):
        raise ConfigError(f"-n {ranks}, but the launcher started {context.size} ranks: leave -n out under a launcher")
    log_to_stderr(context, options.log_level)
    if context.rank == 0 and options.out:
        check_writable(options.out)
    data = options.choice.load(context)
    torch.manual_seed(options.choice.seed)
    with torch.device("meta" if options.meta else "cpu"):
        model = options.choice.build(data)
    _Run(options, context, data, model).go()


class _Run:
    """One rank's part of a run."""

    def __init__(self, options: PipelineOptions, context: Context, data: Data, model: nn.Module) -> None:
        self._options, self._context = options, context
        blocks = context.size // options.replicas
        self._feed = Feed(data, options.batch_size, options.replicas, options.choice.seed)
        self._batches = self._feed.count(options.samples, options.epochs)
        saved = options.checkpoint
        self._store = CheckpointStore(Path(saved.folder), keep=saved.keep) if saved else None
        self._done = self._trained = 0
        self._before = 0.0  # seconds trained before this start
        self._curve: list[Point] = []
        self._losses: list[float] = []
        self._events: list[Done] = []
        self._began = self._saved = self._shown = time.monotonic()
        self._pace, self._method = options.pace(blocks), options.method(blocks)
        self._pipe = Pipeline(
            model,
            optimizer=options.recipe.optimizer_of,
            loss=cross_entropy,
            method=self._method,
            split=options.split,
            replicas=options.replicas,
            options=options.block_options(self._batches * self._feed.whole),
            stall_timeout=options.stall_timeout,
            wants_stop=lambda: preempt.requested() is not None,
            wants_pause=self._save_is_due,
            stretch=self._stretch if self._pace else None,
            record=self._events.append if options.trace else None,
        )

    @property
    def _samples(self) -> int:
        return self._done * self._feed.whole

    @property
    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def go(self) -> None:
        """Trains, evaluates, writes down."""
        self._resume()
        self._log_start()
        tells = self._pipe.is_last and self._pipe.replica == 0
        sinks = open_sinks(self._metrics_file, self._options.tensorboard, resumed=self._done > 0) if tells else []
        for batch in range(self._done, self._batches):
            loss = self._pipe.step(*self._feed.training(batch, self._pipe))
            self._done = batch + 1
            self._losses += [loss] if tells and loss is not None else []
            self._show(sinks)
            if self._pipe.stopping:
                self._stop()
            if self._pipe.pausing:
                self._save()
            if self._evaluation_is_due():
                self._examine()
        self._pipe.drain()
        seconds = self._seconds
        if self._store:
            self._save()
        self._examine(seconds)
        for sink in sinks:
            sink.close()
        self._finish(seconds)

    def _stretch(self, op: Op, step: int, began: float) -> None:
        self._pace.stretch(self._pipe.block, op, step, began, self._method.micro_batches)

    def _examine(self, seconds: float | None = None) -> None:
        now = self._seconds if seconds is None else seconds
        accuracy, loss = self._pipe.test(self._feed.testing(self._pipe))
        self._curve.append(Point(now, self._samples, accuracy, loss))
        if not math.isfinite(loss):
            raise stalempi.NonFiniteError(f"the test loss is {loss}: training diverged; lower --lr")

    def _evaluation_is_due(self) -> bool:
        every = self._options.evaluate_every
        return (
            every is not None
            and self._done < self._batches
            and self._samples // every > (self._samples - self._feed.whole) // every
        )

    def _save_is_due(self) -> bool:
        """Whether the pipe is to be emptied for a checkpoint; true once each time."""
        if self._options.checkpoint is None:
            return False
        samples = (self._done + 1) * self._feed.whole - self._trained
        due = samples >= self._options.checkpoint.samples
        if due or time.monotonic() - self._saved >= self._options.checkpoint.seconds:
            self._saved, self._trained = time.monotonic(), self._trained + samples
            return True
        return False

    def _save(self) -> None:
        assert self._store is not None, "a folder to save in"
        more = {"done": self._done, "seconds": self._seconds, "curve": [asdict(point) for point in self._curve]}
        path = self._pipe.save_checkpoint(self._store, more)
        if path:
            logger.info("checkpoint %s at %d samples", path, self._samples)

    def _resume(self) -> None:
        found = self._options.checkpoint.find() if self._options.checkpoint else None
        if found is None:
            return
        more = self._pipe.load_checkpoint(found)
        self._done, self._before = int(more["done"]), float(more["seconds"])
        self._trained = self._samples
        self._curve = [Point(**point) for point in more["curve"]]
        if self._context.rank == 0:
            logger.info("going on from %s at %d samples", found, self._samples)

    def _stop(self) -> NoReturn:
        if self._store:
            self._save()
        self._pipe.close()
        if self._context.rank == 0:
            saved = "saved" if self._store else "nothing saved, for there is no --checkpoint-dir"
            logger.warning("asked to stop at %d of %d samples: %s", self._samples, self._total, saved)
        raise preempt.Preempted

    @property
    def _total(self) -> int:
        return self._batches * self._feed.whole

    def _log_start(self) -> None:
        if self._context.rank == 0:
            o = self._options
            logger.info(
                "stalempi %s: %s on %d block(s) x %d, %s on %s (%d samples), %s, %s",
                stalempi.__version__,
                self._method,
                self._pipe.blocks,
                o.replicas,
                o.choice.model,
                self._feed.data.name,
                len(self._feed.data.train),
                self._context.transport.description,
                self._context.device.type,
            )

    @property
    def _metrics_file(self) -> Path | None:
        return self._options.metrics or (self._options.out and self._options.out / "metrics.jsonl")

    def _show(self, sinks: Sequence[Sink]) -> None:
        """Writes how far the run is, on the rank that knows the loss."""
        now = time.monotonic()
        if not self._pipe.is_last or self._pipe.replica or now - self._shown < self._options.log_interval:
            return
        speed = self._feed.whole * len(self._losses) / (now - self._shown)
        loss = sum(self._losses) / max(1, len(self._losses))
        left = (self._total - self._samples) / speed if speed else math.inf
        self._shown, self._losses = now, []
        logger.log(
            _SHOWN,
            "%d/%d samples  loss %.4f  %.0f samples/s  %.0f s left",
            self._samples,
            self._total,
            loss,
            speed,
            left,
        )
        row = {"seconds": self._seconds, "samples": self._samples, "loss": loss, "samples_per_second": speed}
        for sink in sinks:
            sink.write(row)

    def _finish(self, seconds: float) -> None:
        told = self._pipe.gather_stats()
        if self._options.out:
            self._pipe.save(self._options.out / "model.pt.partial")
        self._write_trace()
        self._pipe.close()
        if self._context.rank:
            return
        point = self._curve[-1]
        print_blocks(told, seconds)
        click.echo(f"test accuracy: {point.accuracy:.4f}  (loss {point.loss:.4f})")
        click.echo(
            f"run: {seconds:.1f} s, {self._samples} samples, {1e3 * seconds / max(1, self._done):.1f} ms a batch"
        )
        if self._pace:
            click.echo("emulated: " + self._pace.words())
        if self._options.out:
            self._write(told, seconds)

    def _write(self, told: list[PipelineStats], seconds: float) -> None:
        folder, point = self._options.out, self._curve[-1]
        assert folder is not None, "somewhere to write"
        (folder / "model.pt.partial").replace(folder / "model.pt")
        result = {
            "accuracy": point.accuracy,
            "loss": point.loss,
            "seconds": seconds,
            "samples": self._samples,
            "blocks": [asdict(stats) for stats in told],
            "curve": [asdict(each) for each in self._curve],
            "emulated": self._pace.words() if self._pace else "",
            "method": str(self._method),
            "options": self._options.report(),
            "environment": environment(self._context.transport.description),
        }
        write_json(folder / "result.json", result)
        click.echo(f"written: {folder / 'result.json'}, {folder / 'model.pt'}")

    def _write_trace(self) -> None:
        """Writes this block's actions, one JSON object a line, times in seconds from the start of the run."""
        if not self._options.trace:
            return
        zero = self._events[0].begin if self._events else 0.0
        path = self._options.trace.with_name(f"{self._options.trace.name}.{self._context.rank}")
        with path.open("w", encoding="utf-8") as file:
            for done in self._events:
                row = {"block": done.block, "action": str(done.action)}
                row |= {"begin": round(done.begin - zero, 6), "end": round(done.end - zero, 6)}
                file.write(json.dumps(row) + "\n")


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
