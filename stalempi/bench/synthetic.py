"""Is stalempi-bench synthetic: images per second of a model on random data, in the words of Horovod's benchmark."""

from __future__ import annotations

import json
import os
import statistics
import sys
import timeit
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import nn

import stalempi
from stalempi.bench.launch import is_launched, launch_from, launch_options, relaunch
from stalempi.bench.options import policy_from, policy_options
from stalempi.bench.wire import Wire, wire_from, wire_options
from stalempi.context import current
from stalempi.errors import ConfigError
from stalempi.policy import Policy
from stalempi.roles import assign_role
from stalempi.shares import check_servers
from stalempi.train.models import build_model, check_model_name

__all__ = ["summary", "synthetic"]

_LIMIT = 600.0
_count = click.IntRange(min=1)


@dataclass(frozen=True)
class _Options:
    policy: Policy
    wire: Wire
    model: str
    batch_size: int
    image_size: int
    num_warmup_batches: int
    num_batches_per_iter: int
    num_iters: int
    servers: int
    no_cuda: bool


@click.command()
@click.option("-n", "--ranks", type=int, help="Ranks to start. Not under a launcher.")
@launch_options
@click.option("--model", default="resnet50", show_default=True, help="Ours, or any model of torchvision by name.")
@click.option("--batch-size", type=_count, default=32, show_default=True, help="Images per worker and step.")
@click.option("--image-size", type=_count, default=224, show_default=True, help="Pixels, each way.")
@click.option("--num-warmup-batches", type=click.IntRange(min=0), default=10, show_default=True)
@click.option("--num-batches-per-iter", type=_count, default=10, show_default=True)
@click.option("--num-iters", type=_count, default=10, show_default=True)
@click.option("--servers", type=_count, default=1, show_default=True, help="Ranks that serve, each a share.")
@click.option("--no-cuda", is_flag=True, help="Compute on the CPU where there is a GPU too.")
@policy_options
@wire_options
def synthetic(**words: Any) -> None:
    """Measure images per second on random data; the flags and lines are those of Horovod's synthetic benchmark.

    Only workers count: under every policy but allreduce, rank 0 is the server, and N ranks are N - 1 workers; with
    --servers S, N - S.
    """
    launched, launch = is_launched(os.environ), launch_from(words)
    ranks = words.pop("ranks")
    if not launched and ranks is None:
        raise ConfigError("say how many ranks to start, as in -n 3: one server and two workers")
    if ranks is not None and ranks < 2:
        raise ConfigError(f"-n {ranks}: a job needs at least 2 ranks")
    options = _Options(policy=policy_from(words), wire=wire_from(words), **words)
    check_model_name(options.model)
    options.wire.check(options.policy)
    check_servers(options.policy, options.servers)
    if ranks is not None and options.policy.has_server:
        assign_role(0, ranks, servers=options.servers)
    if launched:
        _run(options)
    else:
        relaunch(ranks, sys.argv[1:], launch)


def _run(options: _Options) -> None:
    """Measures on this rank and says what all measured."""
    context = stalempi.init(device="cpu" if options.no_cuda else None, servers=options.servers)
    shape = (3, options.image_size, options.image_size)
    model = build_model(options.model, num_classes=1000, input_shape=shape).to(context.device)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=options.policy, **options.wire.options())
    speeds: list[float] = []
    first = stalempi.worker_rank() == 0
    if stalempi.is_server():
        optimizer.serve()
    else:
        with optimizer:
            speeds = _measure(options, model, optimizer, say=click.echo if first else _hush)
    everybody = [json.loads(text) for text in context.transport.allgather(json.dumps(speeds).encode(), _LIMIT)]
    if first:
        for line in summary([speeds for speeds in everybody if speeds], _kind(context.device)):
            click.echo(line)


def _hush(line: str) -> None:
    del line


def _kind(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else "CPU"


def _measure(options: _Options, model: nn.Module, optimizer: stalempi.DistributedOptimizer, say: Any) -> list[float]:
    """Returns images per second of each iteration."""
    context, kind, size = current(), _kind(current().device), options.batch_size
    x = torch.randn(size, 3, options.image_size, options.image_size, device=context.device)
    y = torch.randint(1000, (size,), device=context.device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    say(f"Model: {options.model}")
    say(f"Batch size: {size}")
    say(f"Number of {kind}s: {context.num_workers}")
    say(f"Policy: {options.policy}")
    say("Running warmup...")
    timeit.timeit(step, number=options.num_warmup_batches)
    say("Running benchmark...")
    speeds = []
    for number in range(options.num_iters):
        seconds = timeit.timeit(step, number=options.num_batches_per_iter)
        speeds.append(size * options.num_batches_per_iter / seconds)
        say(f"Iter #{number}: {speeds[-1]:.1f} img/sec per {kind}")
    return speeds


def summary(speeds: list[list[float]], kind: str) -> list[str]:
    """Returns the last two lines, from the images per second of each iteration of each worker.

    +- is 1.96 standard deviations over the iterations, the mean over workers.
    """
    workers = len(speeds)
    mean = statistics.fmean(statistics.fmean(mine) for mine in speeds)
    half = 1.96 * statistics.fmean(statistics.pstdev(mine) for mine in speeds)
    return [
        f"Img/sec per {kind}: {mean:.1f} +-{half:.1f}",
        f"Total img/sec on {workers} {kind}(s): {workers * mean:.1f} +-{workers * half:.1f}",
    ]
