"""Trains under a virtual clock: real gradients, the product's own server and workers, one thread, no waiting."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.policy import Decision, Event, Policy
from stalempi.replica import DEFAULT_BUCKET_BYTES, Replica
from stalempi.server import Server, ServerOptions
from stalempi.simulate.network import Network
from stalempi.simulate.virtual import VirtualJob, VirtualTransport, VirtualWorker
from stalempi.simulate.workload import Workload
from stalempi.stats import RunStats
from stalempi.train.data import Data
from stalempi.train.evaluate import Point, evaluate
from stalempi.train.loader import DataLoader
from stalempi.train.loss import cross_entropy
from stalempi.train.models import build_model
from stalempi.train.sampler import DistributedSampler
from stalempi.train.schedule import Constant, Schedule, StepDecay

__all__ = ["Learned", "RateBy", "Recipe", "learn"]

RateBy = Literal["samples", "fastest"]
Observe = Callable[[Event, list[Decision]], None]


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; the same for every policy that is compared.

    Attributes:
        data: the images.
        model: a name of `build_model`.
        samples: global samples of the run.
        batch_size: samples per worker and iteration.
        lr, momentum, weight_decay: of SGD.
        decay: shares of `samples` at which the learning rate is divided by 10 (law 11); empty for never.
        evaluate_every: global samples between two evaluations.
        seconds: virtual time at which the run is cut off.
        rate_by: what the learning rate is a function of. "samples": global samples. "fastest": the samples that there
            would be if every worker were as far as the fastest, which is what a schedule by the fastest worker's own
            epochs amounts to; to show what it does to a comparison (papers.md 1.6).
    """

    data: Data
    model: str = "cnn"
    samples: int = 20_000
    batch_size: int = 32
    lr: float = 0.02
    momentum: float = 0.5
    weight_decay: float = 0.0
    decay: tuple[float, ...] = (2 / 3, 5 / 6)
    evaluate_every: int = 1_000
    seconds: float = math.inf
    rate_by: RateBy = "samples"

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "evaluate_every", "lr", "seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    def schedule(self) -> Schedule:
        """Returns the learning rate's factor over global samples."""
        return StepDecay(self.samples, self.decay) if self.decay else Constant()


@dataclass(frozen=True)
class Learned:
    """A finished run; the last point of `curve` is the final model."""

    stats: RunStats
    curve: list[Point]

    def reached(self, accuracy: float) -> Point | None:
        """Returns the first evaluation of at least `accuracy`; None if there is none."""
        return next((point for point in self.curve if point.accuracy >= accuracy), None)


class _Examiner:
    """Evaluates the server's model every so many global samples."""

    def __init__(self, recipe: Recipe, job: VirtualJob, server: Server) -> None:
        self._recipe, self._job, self._server = recipe, job, server
        self._due = recipe.evaluate_every
        self.curve: list[Point] = []

    def look(self) -> None:
        """Evaluates if it is time."""
        if self._server.stats.samples >= self._due:
            self._due = self._server.stats.samples + self._recipe.evaluate_every
            self.examine()

    def examine(self) -> None:
        """Adds a point to the curve; the model's running statistics are made those of all workers together."""
        self._server.combine_buffers()
        model = self._server.replica.model
        accuracy, loss = evaluate(model, self._recipe.data.test, device=torch.device("cpu"))
        self.curve.append(Point(self._job.now, self._server.stats.samples, accuracy, loss))


def learn(
    policy: Policy,
    workload: Workload,
    recipe: Recipe,
    *,
    seed: int = 0,
    network: Network | None = None,
    observe: Observe | None = None,
) -> Learned:
    """Trains `recipe` under `policy` and returns its figures and its accuracy against virtual time.

    Args:
        policy: started here.
        workload: how long each iteration takes in virtual time, whatever it takes here; consumed.
        recipe: what is trained.
        seed: of the weights, the order of the data and dropout; the same seed gives the same run bit for bit.
        network: what messages cost; a push and a release have the model's own size.
        observe: called with every event and the decisions that followed.

    Every gradient is computed with exactly the parameters, and applied in exactly the order, that the virtual clock
    says. Each worker holds a copy of the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(recipe.model, num_classes=recipe.data.num_classes, input_shape=recipe.data.input_shape)
        return _Run(policy, workload, recipe, seed=seed, network=network or Network(), model=model).run(observe)


class _Run:
    """One server and its workers; every rank has its own copy of the model."""

    def __init__(
        self, policy: Policy, workload: Workload, recipe: Recipe, *, seed: int, network: Network, model: nn.Module
    ) -> None:
        copies = [copy.deepcopy(model) for _ in range(workload.num_workers)]
        replica = _replica(model, recipe)
        sizes = replace(network, push_bytes=_push_bytes(replica), release_bytes=replica.release_parts().nbytes)
        self._job = job = VirtualJob(workload, sizes, seconds=recipe.seconds)
        schedule = recipe.schedule()
        by_fastest = partial(_by_fastest, schedule, policy, recipe.batch_size)
        chosen = schedule if recipe.rate_by == "samples" else by_fastest
        options = ServerOptions(
            total_samples=recipe.samples,
            schedule=chosen,
            stall_warning=math.inf,  # nobody is silent in virtual time, however long an iteration takes
            stall_timeout=math.inf,
            now=lambda: job.now,
        )
        self._server = Server(replica, policy, VirtualTransport(job, 0), options=options, observe=self._see)
        self._examiner = _Examiner(recipe, job, self._server)
        for number, theirs in enumerate(copies):
            sampler = DistributedSampler(
                len(recipe.data.train), num_workers=workload.num_workers, worker_rank=number, seed=seed
            )
            batches = _endless(DataLoader(recipe.data.train, recipe.batch_size, sampler=sampler))
            job.add(_replica(theirs, recipe), _Step(theirs, batches), schedule=chosen)

    def run(self, observe: Observe | None) -> Learned:
        """Serves until all workers have left."""
        self._observe = observe
        self._job.start()
        stats = self._server.serve()
        self._examiner.examine()
        return Learned(stats, self._examiner.curve)

    def _see(self, event: Event, decisions: list[Decision]) -> None:
        self._examiner.look()
        if self._observe:
            self._observe(event, decisions)


class _Step:
    """Computes one gradient of one worker and pushes it."""

    def __init__(self, model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        self._model, self._batches = model, batches

    def __call__(self, worker: VirtualWorker) -> None:
        x, y = next(self._batches)
        worker.zero_grad()
        loss = cross_entropy(self._model(x), y)
        loss.backward()
        worker.step(samples=len(x), loss=float(loss.detach()))


def _replica(model: nn.Module, recipe: Recipe) -> Replica:
    optimizer = torch.optim.SGD(
        model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    return Replica(model, optimizer, bucket_bytes=DEFAULT_BUCKET_BYTES)


def _push_bytes(replica: Replica) -> int:
    return replica.push_packet(replica.wire(replica.params.like()), replica.buffers).parts.nbytes


def _by_fastest(schedule: Schedule, policy: Policy, batch_size: int, _: int) -> float:
    return schedule(policy.clocks.most * batch_size * len(policy.clocks.counts))


def _endless(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader
