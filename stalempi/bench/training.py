"""Runs one rank of stalempi-bench train."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

import stalempi
from stalempi.bench.choice import Choice
from stalempi.bench.emulate import Pace, parse_slow
from stalempi.bench.metrics import Metrics, check_board, open_sinks
from stalempi.bench.progress import Display
from stalempi.bench.recipe import Recipe
from stalempi.bench.report import check_writable, environment, print_summary, write_results
from stalempi.bench.steps import Stepper, grouped
from stalempi.bench.virtual import plain_warnings
from stalempi.bench.wire import Wire
from stalempi.context import Context, current
from stalempi.correction import Correction, make_correction
from stalempi.entry import parse_device
from stalempi.errors import ConfigError
from stalempi.group import check_forward, check_groups
from stalempi.logs import log_to_stderr, logger
from stalempi.policy import Decision, Event, Policy
from stalempi.shares import check_servers
from stalempi.simulate.scenarios import find_scenario
from stalempi.trace import Recorder
from stalempi.train.data import Data
from stalempi.train.evaluate import evaluate
from stalempi.train.every import Every
from stalempi.train.keeper import Checkpoint

__all__ = ["TrainOptions", "run_rank"]


@dataclass(frozen=True)
class TrainOptions:
    """What the user asked for; see the command's help."""

    policy: Policy
    recipe: Recipe
    choice: Choice
    wire: Wire
    loader_processes: int
    epochs: int
    samples: int | None
    batch_size: int
    correction: str
    device: str | None
    slow: tuple[str, ...]
    emulate_ms: float | None
    scenario: str | None
    iteration_ms: float
    servers: int
    group: int
    evaluator: bool
    evaluate_every: str | None
    stall_timeout: float | None
    checkpoint: Checkpoint | None
    grace: float
    trace: Path | None
    log_interval: float
    log_level: str | None
    metrics: Path | None
    tensorboard: Path | None
    out: Path | None

    def __post_init__(self) -> None:
        check_groups(self.policy, self.group)
        Every.parse(self.evaluate_every, "evaluate")
        if self.device is not None:
            parse_device(self.device)
        self._check_job()
        if self.scenario and self.emulate_ms:
            raise ConfigError("give one of --scenario and --emulate-ms: both say how long an iteration takes")
        if self.scenario and find_scenario(self.scenario).dies:
            raise ConfigError(f"--scenario {self.scenario} is for simulate and compare: a lost rank ends an MPI job")
        if self.tensorboard is not None:
            check_board()

    def _check_job(self) -> None:
        """Raises ConfigError if the policy, groups, checkpoints and the like do not go together."""
        self.wire.check(self.policy)
        check_servers(self.policy, self.servers, clip_norm=self.recipe.clip_norm)
        check_forward(self.policy, self.group, run_ahead=self.wire.run_ahead, early_forward=self.wire.early_forward)
        if self.policy.has_server:
            return
        if self.trace:
            raise ConfigError(f"--trace records what a server decides, and {self.policy.name} has none: leave it out")
        if self.group > 1 or self.evaluator:
            raise ConfigError(f"--group and --evaluator are of a job with a server, and {self.policy.name} has none")
        if self.correction != "none":
            raise ConfigError(f"--correction mends stale gradients, and under {self.policy.name} none is stale")
        if self.recipe.amp == "fp16":
            raise ConfigError(f"--amp fp16 scales gradients, which {self.policy.name} has sent by then: take bf16")
        if self.checkpoint:
            raise ConfigError(f"--checkpoint-dir: the server saves a run, and {self.policy.name} has none")

    def total_samples(self, data: Data) -> int:
        """Returns the global samples of the whole run."""
        return self.samples or self.epochs * len(data.train)

    def scale(self, context: Context) -> int:
        """Returns what --lr is multiplied by in this job."""
        workers = context.num_workers if self.policy.has_server else context.size
        return self.recipe.scale(self.policy, workers, self.group)

    def check_shards(self, data: Data, num_shards: int) -> None:
        """Raises ConfigError if the smallest shard does not fill one batch; on every rank alike."""
        shard = len(data.train) // num_shards
        if self.batch_size > shard:
            raise ConfigError(
                f"--batch-size {self.batch_size} is larger than a shard: {len(data.train)} samples over {num_shards} "
                f"worker(s) are {shard} each; make it smaller or start fewer ranks"
            )

    def report(self) -> dict[str, Any]:
        """Returns the options as result.json holds them."""
        plain = asdict(self) | {"policy": str(self.policy)}
        plain |= plain.pop("recipe") | plain.pop("choice") | plain.pop("wire")
        plain["checkpoint"] = str(self.checkpoint) if self.checkpoint else None
        return {key: str(value) if isinstance(value, Path) else value for key, value in plain.items()}


def run_rank(options: TrainOptions, ranks: int | None) -> None:
    """Serves or works, as this rank is to; `ranks` is what the user expects, if they said."""
    context = stalempi.init(
        device=options.device,
        group=options.group,
        evaluator=options.evaluator,
        servers=options.servers,
        grace=options.grace,
    )
    if ranks not in (None, context.size):
        raise ConfigError(f"-n {ranks}, but the launcher started {context.size} ranks: leave -n out under a launcher")
    context = context if options.policy.has_server else context.without_server()
    log_to_stderr(context, options.log_level)
    servers = context.role.servers
    slow = parse_slow(options.slow, servers + context.num_shards, first=servers)
    if context.rank == 0 and options.out:
        check_writable(options.out)
    torch.manual_seed(options.choice.seed)
    data = options.choice.load(context)
    options.check_shards(data, context.num_shards)
    model = options.choice.build(data)
    model.to(context.device)
    pace = Pace(slow.get(context.rank, 1.0), options.emulate_ms, scenario=_scenario(options, context))
    if context.rank == 0:
        _lead(options, data, model, pace)
    elif context.is_server:
        _distribute(options, data, model, make_correction(options.correction)).serve()
    elif context.is_evaluator:
        _distribute(options, data, model, make_correction(options.correction)).evaluate()
    else:
        optimizer = _distribute(options, data, model, make_correction(options.correction))
        _work(options, data, model, optimizer, pace)


def _scenario(options: TrainOptions, context: Context) -> Callable[[float], float] | None:
    """Returns how long this worker's iterations take by the scenario, in seconds; the same draws as when simulated."""
    if options.scenario is None or context.worker_rank is None:
        return None
    scenario, unit = find_scenario(options.scenario), options.iteration_ms / 1e3
    workload = scenario.workload(context.num_workers, seed=options.choice.seed, horizon=1.0, unit=unit)

    def seconds(now: float) -> float:
        assert context.worker_rank is not None
        found = workload.compute(context.worker_rank, now)
        assert found is not None, "a scenario never runs out"
        return found

    return seconds


def _distribute(
    options: TrainOptions,
    data: Data,
    model: nn.Module,
    correction: Correction | None,
    observe: Callable[[Event, list[Decision]], None] | None = None,
) -> stalempi.DistributedOptimizer:
    context, total, recipe = current(), options.total_samples(data), options.recipe
    scale = options.scale(context)

    def measure(model: nn.Module) -> tuple[float, float]:
        return evaluate(model, data.test, device=context.device)

    return stalempi.DistributedOptimizer(
        recipe.make_optimizer(model, scale),
        model=model,
        policy=options.policy,
        total_samples=total,
        schedule=recipe.factor(total, scale),
        nonfinite=recipe.nonfinite,
        clip_norm=recipe.clip_norm,
        clip_value=recipe.clip_value,
        correction=correction,
        evaluation=stalempi.Evaluation(measure, options.evaluate_every),
        stall_timeout=options.stall_timeout,
        observe=observe,
        checkpoint=options.checkpoint,
        **options.wire.options(),
    )


def _work(
    options: TrainOptions, data: Data, model: nn.Module, optimizer: stalempi.DistributedOptimizer, pace: Pace
) -> None:
    context = current()
    sampler = stalempi.DistributedSampler(len(data.train), seed=options.choice.seed)
    loader = stalempi.DataLoader(
        data.train,
        options.batch_size,
        sampler=sampler,
        num_workers=options.loader_processes,
        persistent_workers=options.loader_processes > 0,
    )
    torch.manual_seed(options.choice.seed + context.rank)  # dropout differs between workers
    with optimizer:
        optimizer.track(loader)
        logger.info("%d samples of %d, on %s", len(sampler), len(data.train), context.device)
        stepper = Stepper(model, optimizer, options.recipe.amp, context.device)
        while not optimizer.done:
            for batches in grouped(loader, options.recipe.accumulate):
                pace.begin()
                pace.end(stepper.compute(batches))
                stepper.push()
                if optimizer.done:
                    break
            logger.debug("epoch %d over at step %d", sampler.epoch, optimizer.step_count)
    logger.info("left after %d steps", optimizer.step_count)


def _lead(options: TrainOptions, data: Data, model: nn.Module, pace: Pace) -> None:
    """Serves, or works as the one that reports where there is no server, and says what came out."""
    watchers: list[Callable[[Event, list[Decision]], None]] = []

    def observe(event: Event, decisions: list[Decision]) -> None:
        for watcher in watchers:
            watcher(event, decisions)

    correction = make_correction(options.correction)
    optimizer = _distribute(options, data, model, correction, observe)
    context = current()
    _log_start(options, data, optimizer.share_bytes)
    resumed = context.is_server and optimizer.resumed_from is not None
    if resumed:
        logger.info("resumed from %s at %d samples", optimizer.resumed_from, optimizer.global_samples)
    if correction:
        logger.info("correction %s: %.1f MiB more on the server", correction.name, correction.nbytes / 2**20)

    with ExitStack() as stack:
        if options.trace:
            watchers.append(
                stack.enter_context(Recorder(options.trace, options.policy, started=lambda: optimizer.stats.started))
            )
        watchers.append(
            stack.enter_context(
                Display(
                    options.total_samples(data),
                    lambda: optimizer.stats,
                    lambda: _largest_gap(options.policy),
                    lambda: optimizer.rate,
                    options.log_interval,
                )
            )
        )
        lines = options.metrics or (options.out and options.out / "metrics.jsonl")
        if sinks := open_sinks(lines, options.tensorboard, resumed=resumed):
            watchers.append(
                stack.enter_context(
                    Metrics(lambda: optimizer.stats, lambda: optimizer.rate, options.log_interval, sinks)
                )
            )
        stack.enter_context(plain_warnings())
        if context.is_server:
            optimizer.serve()
        else:
            _work(options, data, model, optimizer, pace)
    _finish(options, model, optimizer, optimizer.evaluate())


def _log_start(options: TrainOptions, data: Data, share_bytes: Sequence[int]) -> None:
    context, recipe = current(), options.recipe
    groups = f" of {options.group} ranks" if options.group > 1 else ""
    if options.servers > 1:
        sizes = " + ".join(f"{nbytes / 2**20:.1f}" for nbytes in share_bytes)
        groups += f", {options.servers} servers ({sizes} MiB)"
    groups += ", an evaluator" if options.evaluator else ""
    logger.info(
        "stalempi %s: %s, %d worker(s)%s, %s on %s (%d samples), %s, %s, messages from %s",
        stalempi.__version__,
        options.policy,
        context.num_workers,
        groups,
        options.choice.model,
        data.name,
        len(data.train),
        context.transport.description,
        context.device.type,
        context.transport.buffers,
    )
    batches = recipe.batches_per_update(options.policy, context.num_workers, options.group)
    scale = options.scale(context)
    logger.info(
        "an update stands for %d x %d samples; learning rate %g x %d", batches, options.batch_size, recipe.lr, scale
    )


def _largest_gap(policy: Policy) -> int:
    return max((policy.clocks.gap(worker) for worker in policy.clocks.workers()), default=0)


def _finish(
    options: TrainOptions, model: nn.Module, optimizer: stalempi.DistributedOptimizer, evaluation: stalempi.Evaluation
) -> None:
    context, stats = current(), optimizer.stats
    accuracy, loss = evaluation.curve[-1].accuracy, evaluation.curve[-1].loss
    if not math.isfinite(loss):
        raise stalempi.NonFiniteError(f"the test loss is {loss}: training diverged; lower --lr")
    headline = {
        "test accuracy": f"{accuracy:.4f}  (loss {loss:.4f})",
        "run": f"{stats.seconds:.1f} s, {stats.samples} samples, {stats.updates} updates",
    }
    labels = [f"--slow {spec}" for spec in options.slow]
    labels += [f"--emulate-ms {options.emulate_ms:g}"] if options.emulate_ms else []
    labels += [f"--scenario {options.scenario} --iteration-ms {options.iteration_ms:g}"] if options.scenario else []
    if labels:
        headline["emulated"] = ", ".join(labels)
    if options.policy.has_server:
        held = {what: nbytes for what, nbytes in optimizer.memory.items() if nbytes}
        words = " + ".join(f"{what} {nbytes / 2**20:.1f}" for what, nbytes in held.items())
        headline["server memory"] = f"{sum(held.values()) / 2**20:.1f} MiB: {words}"
    print_summary(stats, headline)
    if not options.out:
        return
    figures = stats.report()
    result: dict[str, object] = {"accuracy": accuracy, "loss": loss, "train_loss": figures.pop("loss"), **figures}
    result |= {
        "lr": {
            "asked": options.recipe.lr,
            "scaled": options.recipe.lr * options.scale(context),
            "last": optimizer.rate,
        },
        "curve": [asdict(point) for point in evaluation.curve],
        "snapshots_skipped": evaluation.skipped,
        "server_memory": optimizer.memory if options.policy.has_server else {},
        "share_bytes": optimizer.share_bytes,
        "emulated": labels,
        "options": options.report(),
        "environment": environment(context.transport.description) | {"buffers": context.transport.buffers},
    }
    write_results(options.out, result, model)
    click.echo(f"written: {options.out / 'result.json'}, {options.out / 'model.pt'}")
