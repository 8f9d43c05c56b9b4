"""Runs one rank of stalempi-bench pipeline."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click
import torch
from torch import nn

import stalempi
from stalempi import preempt
from stalempi.bench.block_report import BlockProgress, BlockTrace, print_blocks
from stalempi.bench.feed import Feed
from stalempi.bench.metrics import open_sinks
from stalempi.bench.output import check_output
from stalempi.bench.pipeline_options import PipelineOptions
from stalempi.bench.report import environment, write_json
from stalempi.context import Context
from stalempi.errors import ConfigError
from stalempi.logs import log_to_stderr, logger
from stalempi.pipeline.actions import Op
from stalempi.pipeline.pipeline import Pipeline, PipelineStats
from stalempi.silence import default_stall_timeout
from stalempi.train.checkpoint import CheckpointStore
from stalempi.train.data import Data
from stalempi.train.evaluate import Point
from stalempi.train.loss import cross_entropy

__all__ = ["run_block"]


def run_block(options: PipelineOptions, ranks: int | None) -> None:
    """Trains this rank's block; `ranks` is what the user expects, if they said."""
    context = stalempi.init(device=options.device, pipeline=True, grace=options.grace)
    if ranks not in (None, context.size):
        raise ConfigError(f"-n {ranks}, but the launcher started {context.size} ranks: leave -n out under a launcher")
    log_to_stderr(context, options.log_level)
    options.check(context.size)
    if context.rank == 0:
        check_output(options)
    context.transport.allgather(b"", options.stall_timeout or default_stall_timeout())  # the folders are there
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
        self._trace = BlockTrace(_of_rank(options.trace, context.rank)) if options.trace else None
        self._began = self._saved = time.monotonic()
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
            record=self._trace,
            identity={
                "model": options.choice.model,
                "data set": options.choice.dataset,
                "samples to train on": len(data.train),
                "batch size": options.batch_size,
            },
        )

    @property
    def _samples(self) -> int:
        return self._done * self._feed.whole

    @property
    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def go(self) -> None:
        """Trains, evaluates, writes down."""
        with self._trace or nullcontext():
            self._resume()
            self._log_start()
            with self._progress() if self._tells else nullcontext() as progress:
                self._train(progress)
            seconds = self._seconds
            if self._store:
                self._save()
            self._examine(seconds)
            self._finish(seconds)

    def _train(self, progress: BlockProgress | None) -> None:
        for batch in range(self._done, self._batches):
            loss = self._pipe.step(*self._feed.training(batch, self._pipe))
            self._done = batch + 1
            if progress:
                progress.add(self._samples, loss)
            if self._pipe.stopping:
                self._stop()
            if self._pipe.pausing:
                self._save()
            if self._evaluation_is_due():
                self._examine()
        self._pipe.drain()

    @property
    def _tells(self) -> bool:
        """Whether this is the rank that knows the loss."""
        return self._pipe.is_last and self._pipe.replica == 0

    def _progress(self) -> BlockProgress:
        options = self._options
        lines = options.metrics or (options.out and options.out / "metrics.jsonl")
        sinks = open_sinks(lines, options.tensorboard, resumed=self._done > 0)
        return BlockProgress(
            options.log_interval, self._feed.whole, self._total, sinks, seconds=lambda: self._seconds, rate=self._rate
        )

    def _rate(self) -> float | None:
        optimizer = self._pipe.optimizer
        return float(optimizer.param_groups[0]["lr"]) if optimizer else None

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
        checkpoint = self._options.checkpoint
        if checkpoint is None:
            return
        found = checkpoint.find() if self._context.rank == 0 else None
        more = self._pipe.load_checkpoint(found)
        if more is None:
            return
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

    def _finish(self, seconds: float) -> None:
        told = self._pipe.gather_stats()
        if self._options.out:
            self._pipe.save(self._options.out / "model.pt.partial")
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
            click.echo("emulated: " + ", ".join(self._pace.words()))
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
            "emulated": self._pace.words() if self._pace else [],
            "method": str(self._method),
            "options": self._options.report(),
            "environment": environment(self._context.transport.description),
        }
        write_json(folder / "result.json", result)
        click.echo(f"written: {folder / 'result.json'}, {folder / 'model.pt'}")


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.{rank}")
