"""Is stalempi-bench simulate: plays one policy under a virtual clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from stalempi.bench.options import FiniteRange, policy_from, policy_options
from stalempi.bench.virtual import (
    learning_options,
    local_console,
    network_from,
    network_options,
    options_given,
    plain_warnings,
    recipe_from,
    refuse_idle,
    source_from,
    source_options,
)
from stalempi.errors import ConfigError
from stalempi.policy import Decision, Event, Policy, Push
from stalempi.simulate.figures import Figures
from stalempi.simulate.learning import learn
from stalempi.simulate.predict import recorded
from stalempi.simulate.timing import Limit
from stalempi.simulate.timing import simulate as run_timing
from stalempi.stats import RunStats
from stalempi.trace import Recorder, read_trace, replay
from stalempi.train.evaluate import Point

__all__ = ["simulate"]

Observe = Callable[[Event, list[Decision]], None]

_MOST_ROWS = 16
_BESIDE_TRACE = {
    "policy",
    "bound",
    "lower",
    "upper",
    "controller",
    "predictor",
    "narrow",
    "backup",
    "trace",
    "record",
    "as_json",
}
_positive = FiniteRange(min=0, min_open=True)
_file = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True)
class _Played:
    """A run, and what to say of it above its table."""

    stats: RunStats
    notes: dict[str, str]
    curve: tuple[Point, ...] = ()


@click.command()
@policy_options
@source_options
@network_options
@learning_options
@click.option("--trace", type=_file, help="Play a recorded run back: its own policy or --policy, its service times.")
@click.option("--seconds", type=_positive, help="Virtual seconds [default: 2000 iterations].")
@click.option("--pushes", type=click.IntRange(min=1), help="End after so many pushes instead.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--record", type=_file, help="Write every event to this file, as train --trace does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def simulate(context: click.Context, /, **words: Any) -> None:
    """Play a policy under a virtual clock.

    Workers compute for as long as a scenario, a distribution, a file or a recorded run says; with --learn they compute
    real gradients, and accuracy against virtual time comes out.
    """
    given = options_given(context)
    refuse_idle(given)
    as_json, record, file = words.pop("as_json"), words.pop("record"), words.pop("trace")
    policy = policy_from(words)
    if not policy.has_server:
        raise ConfigError(f"--policy {policy.name} has no server to play: take bsp, which decides the same")
    if file is not None and (stray := given - _BESIDE_TRACE):
        options = ", ".join(sorted(f"--{key.replace('_', '-')}" for key in stray))
        raise ConfigError(f"--trace brings its own workers, times and end: leave {options} out")
    own = file is not None and "policy" not in given
    policy = read_trace(file).start.make_policy() if own else policy
    with ExitStack() as stack:
        stack.enter_context(plain_warnings())
        observe = stack.enter_context(Recorder(record, policy, started=lambda: 0.0)) if record else None
        played = _play_back(file, policy, own, observe) if file else _play(policy, words, observe)
    _print_json(policy, played) if as_json else _print(policy, played)


def _play_back(file: Path, policy: Policy, own: bool, observe: Observe | None) -> _Played:
    """Plays a recorded run under its own policy, which must decide the same again, or under another."""
    trace = read_trace(file)
    pushes = sum(isinstance(record.event, Push) for record in trace.records)
    took = trace.records[-1].event.now - trace.start.now if trace.records else 0.0
    notes = {"recorded": f"{took:.3f} s, {pushes} pushes under {trace.start.make_policy()}"}
    if own:
        notes["decided otherwise"] = f"{len(replay(trace))} of {len(trace.records)} events"
    limit = Limit() if own else Limit(pushes=max(1, pushes))
    stats = run_timing(policy, recorded(trace, again=not own), limit=limit, observe=observe)
    notes["predicted"] = f"{stats.seconds:.3f} s" + (f" ({100 * (stats.seconds / took - 1):+.1f}%)" if took else "")
    return _Played(stats, notes)


def _play(policy: Policy, words: dict[str, Any], observe: Observe | None) -> _Played:
    seconds, pushes, seed = words.pop("seconds"), words.pop("pushes"), words.pop("seed")
    source, network = source_from(words), network_from(words)
    recipe = recipe_from(words, seconds=seconds)
    notes = {"workload": f"{source.text}, {source.num_workers} workers, seed {seed}"}
    if recipe is not None:
        if pushes is not None:
            raise ConfigError("--learn runs for --samples, or --seconds: leave --pushes out")
        horizon = source.horizon(recipe.samples / recipe.batch_size)
        learned = learn(policy, source.make(seed, horizon), recipe, seed=seed, network=network, observe=observe)
        last = learned.curve[-1]
        notes["test accuracy"] = f"{last.accuracy:.4f} after {last.samples} samples"
        return _Played(learned.stats, notes, tuple(learned.curve))
    if seconds is None and pushes is None:
        seconds = 2000 * source.iteration
    horizon = seconds if seconds is not None else source.horizon(pushes)
    limit = Limit(math.inf if seconds is None else seconds, pushes)
    workload = source.make(seed, horizon)
    return _Played(run_timing(policy, workload, limit=limit, network=network, observe=observe), notes)


def _print(policy: Policy, played: _Played) -> None:
    screen = local_console()
    f = Figures.of(played.stats)
    lines = {
        "policy": str(policy),
        **played.notes,
        "virtual time": f"{f.seconds:.3f} s",
        "throughput": f"{f.gradients_per_second:.2f} gradients/s, {f.updates_per_second:.2f} updates/s",
        "waiting": f"{100 * f.wait_share:.1f}%",
        "gap": f"mean {f.gap_mean:.2f}, largest {f.gap_max}",
        "staleness": f"mean {f.staleness_mean:.2f}, largest {f.staleness_max}",
    }
    for key, value in lines.items():
        screen.print(f"{key}: {value}", highlight=False)
    screen.print(_table(played.stats), highlight=False)
    if (more := len(played.stats.workers) - _MOST_ROWS) > 0:
        screen.print(f"and {more} more workers", highlight=False)


def _table(stats: RunStats) -> Table:
    table = Table("worker", "pushes", "waiting", "gap mean/max", "staleness", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for number, worker in enumerate(stats.workers[:_MOST_ROWS]):
        r = worker.report()
        table.add_row(
            str(number),
            str(r["iterations"]),
            f"{100 * r['wait_share']:.1f}%",
            f"{r['gap_mean']:.2f}/{r['gap_max']}",
            f"{r['staleness_mean']:.2f}/{r['staleness_max']}",
        )
    return table


def _print_json(policy: Policy, played: _Played) -> None:
    result: dict[str, object] = {"policy": str(policy), **played.notes, "figures": asdict(Figures.of(played.stats))}
    result |= played.stats.report() | {"curve": [asdict(point) for point in played.curve]}
    click.echo(json.dumps(result, indent=2))
