"""Holds the command-line options of runs in virtual time, which simulate and compare share."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from click.core import ParameterSource
from rich.console import Console

from stalempi.bench.options import FiniteRange, parse_shares
from stalempi.errors import ConfigError
from stalempi.simulate.learning import Recipe
from stalempi.simulate.network import Link, Network
from stalempi.simulate.scenarios import SCENARIOS, find_scenario
from stalempi.simulate.workload import Workload, drawn, listed, parse_distribution, read_intervals
from stalempi.train.datasets import DATASETS, load_dataset

__all__ = [
    "Source",
    "learning_options",
    "local_console",
    "network_from",
    "network_options",
    "options_given",
    "parse_links",
    "plain_warnings",
    "recipe_from",
    "refuse_idle",
    "source_from",
    "source_options",
]

_LEARNING = {"data_dir", "model", "samples", "batch_size", "lr", "momentum", "lr_decay"}

F = TypeVar("F", bound=Callable[..., Any])

_positive = FiniteRange(min=0, min_open=True)
_least_0 = FiniteRange(min=0)
_count = click.IntRange(min=1)
_file = click.Path(path_type=Path, dir_okay=False)


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def source_options(function: F) -> F:
    """Adds what says how long workers compute."""
    add: Callable[[F], F] = _all(
        click.option("--scenario", type=click.Choice(list(SCENARIOS)), help="A named scenario [default: stalls]."),
        click.option("--compute", metavar="DIST", help='Seconds an iteration, such as "normal:0.1:0.01".'),
        click.option("--intervals", type=_file, help="A file of compute times: one line of seconds a worker."),
        click.option("--workers", type=_count, help="Number of workers [default: the scenario's, or 4]."),
        click.option("--iteration-ms", type=_positive, default=100.0, show_default=True, help="Of a scenario."),
    )
    return add(function)


def network_options(function: F) -> F:
    """Adds what says how long messages take."""
    add: Callable[[F], F] = _all(
        click.option("--latency-ms", type=_least_0, default=0.0, help="Of a message, each way."),
        click.option(
            "--bandwidth", type=_positive, help="MB/s of the server's link, each direction [default: no limit]."
        ),
        click.option("--message-mb", type=_least_0, default=0.0, help="Size of a push and of a release."),
        click.option("--service-ms", type=_least_0, default=0.0, help="The server's work on a push."),
        click.option(
            "--handshakes", type=click.IntRange(min=0), default=0, help="Round trips before a message with contents."
        ),
        click.option(
            "--link", multiple=True, metavar="WORKER=MS[:MB/S]", help="A slower way to one worker. Repeatable."
        ),
    )
    return add(function)


def learning_options(function: F) -> F:
    """Adds what says what is learned."""
    add: Callable[[F], F] = _all(
        click.option("--learn", type=click.Choice(DATASETS), help="Compute real gradients on this data set."),
        click.option("--data-dir", type=click.Path(path_type=Path), help="Where the data lies."),
        click.option("--model", default="cnn", show_default=True),
        click.option("--samples", type=_count, default=20_000, show_default=True, help="Global samples to train on."),
        click.option("--batch-size", type=_count, default=32, show_default=True),
        click.option("--lr", type=_positive, default=0.02, show_default=True),
        click.option("--momentum", type=FiniteRange(0, 1, max_open=True), default=0.5, show_default=True),
        click.option("--lr-decay", default="0.667,0.833", show_default=True, help='Shares of --samples; "" for none.'),
    )
    return add(function)


def options_given(context: click.Context) -> set[str]:
    """Returns the names of the options that the user gave, as click has them."""
    return {key for key in context.params if context.get_parameter_source(key) is not ParameterSource.DEFAULT}


def refuse_idle(given: set[str]) -> None:
    """Raises ConfigError if an option was given that nothing would look at."""
    idle: set[str] = set() if "learn" in given else given & _LEARNING
    if idle:
        raise ConfigError(f"{_options(idle)} without --learn: add --learn digits, or leave it out")
    if {"learn", "message_mb"} <= given:
        raise ConfigError("--message-mb beside --learn: a message has the model's own size")
    if "iteration_ms" in given and given & {"compute", "intervals"}:
        raise ConfigError("--iteration-ms is of a scenario: --compute and --intervals give seconds")


def local_console() -> Console:
    """Returns a console on stdout, as wide as the terminal; 120 columns where there is none."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(file=sys.stdout, width=120 if piped else None)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Says each warning once, as a line without the code that it came from."""
    said: set[str] = set()

    def say(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            click.echo(f"stalempi-bench: warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = say
        yield


def _options(names: set[str]) -> str:
    return ", ".join(sorted(f"--{name.replace('_', '-')}" for name in names))


@dataclass(frozen=True)
class Source:
    """Where compute times come from: `make(seed, horizon in s)` returns the workload of one run.

    `iteration` is the mean time (s) of an undisturbed iteration, about.
    """

    text: str
    num_workers: int
    iteration: float
    make: Callable[[int, float], Workload]

    def horizon(self, pushes: float) -> float:
        """Returns about how many seconds so many pushes of all workers take."""
        return self.iteration * pushes / self.num_workers


def source_from(words: dict[str, Any]) -> Source:
    """Takes the source's options out of a command's parameters; ConfigError if they contradict each other."""
    scenario, compute, intervals = words.pop("scenario"), words.pop("compute"), words.pop("intervals")
    workers, unit = words.pop("workers"), words.pop("iteration_ms") / 1e3
    if sum(option is not None for option in (scenario, compute, intervals)) > 1:
        raise ConfigError("give one of --scenario, --compute and --intervals")
    if intervals is not None:
        return _from_file(intervals, workers)
    if compute is not None:
        number = workers or 4
        distribution = parse_distribution(compute)
        mean = float(compute.split(":")[1])
        return Source(compute, number, mean, lambda seed, _: drawn(distribution, number, seed=seed))
    named = find_scenario(scenario)
    number = named.num_workers if workers is None else workers
    named.workload(number, seed=0, horizon=1.0, unit=unit)

    def make(seed: int, horizon: float) -> Workload:
        return named.workload(number, seed=seed, horizon=horizon, unit=unit)

    return Source(named.name, number, unit, make)


def _from_file(path: Path, workers: int | None) -> Source:
    rows = read_intervals(path)
    if workers not in (None, len(rows)):
        raise ConfigError(f"--workers {workers}, but {path} has {len(rows)} lines: leave --workers out")
    mean = sum(map(sum, rows)) / sum(map(len, rows))
    return Source(path.name, len(rows), mean, lambda seed, horizon: listed(rows))


def network_from(words: dict[str, Any]) -> Network:
    """Takes the network's options out of a command's parameters."""
    latency, service = words.pop("latency_ms") / 1e3, words.pop("service_ms") / 1e3
    bandwidth, size = words.pop("bandwidth"), round(words.pop("message_mb") * 1e6)
    limit = math.inf if bandwidth is None else bandwidth * 1e6
    return Network(latency, limit, size, size, service, words.pop("handshakes"), parse_links(words.pop("link")))


def parse_links(specs: Sequence[str]) -> tuple[Link, ...]:
    """Reads WORKER=MS[:MB/S] words, latency and bandwidth of a worker's own link; ConfigError otherwise."""
    found: dict[int, Link] = {}
    for spec in specs:
        match = re.fullmatch(r"(\d+)=([^:]+)(?::(.+))?", spec)
        try:
            values = [float(match[2]) / 1e3, float(match[3] or "inf") * 1e6] if match else []
        except ValueError:
            values = []
        if not match or not values:
            raise ConfigError(f"--link takes WORKER=MS[:MB/S], as in --link 2=20:12.5, got {spec!r}")
        if int(match[1]) in found:
            raise ConfigError(f"--link {spec}: worker {match[1]} has a link already")
        found[int(match[1])] = Link(*values)
    return tuple(found.get(worker, Link()) for worker in range(max(found, default=-1) + 1))


def recipe_from(words: dict[str, Any], *, seconds: float | None = None, evaluations: int = 40) -> Recipe | None:
    """Takes what is learned out of a command's parameters; None without --learn. `seconds` cuts the run off."""
    dataset, data_dir = words.pop("learn"), words.pop("data_dir")
    samples, decay = words.pop("samples"), parse_shares(words.pop("lr_decay"))
    options = {key: words.pop(key) for key in ("model", "batch_size", "lr", "momentum")}
    if dataset is None:
        return None
    torch.set_num_threads(1)  # so that a run does not depend on the machine it is played on
    data = load_dataset(dataset, data_dir=data_dir)
    every = max(1, samples // evaluations)
    recipe = Recipe(data, samples=samples, decay=decay, evaluate_every=every, seconds=seconds or math.inf, **options)
    recipe.schedule()
    return recipe
