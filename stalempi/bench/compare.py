"""Is stalempi-bench compare: many policies and seeds in one table and one picture."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from stalempi.bench.launch import Launch, launch_from, launch_options, launch_words
from stalempi.bench.options import FiniteRange
from stalempi.bench.picture import draw, need_matplotlib
from stalempi.bench.real import RealRuns
from stalempi.bench.report import check_writable
from stalempi.bench.table import markdown, screen_tables
from stalempi.bench.virtual import (
    Source,
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
from stalempi.policy import SSP
from stalempi.simulate.clairvoyant import clairvoyant
from stalempi.simulate.figures import Figures
from stalempi.simulate.learning import Recipe, learn
from stalempi.simulate.network import Network
from stalempi.simulate.scenarios import find_scenario
from stalempi.simulate.sweep import Outcome, Row, parse_policies, parse_policy, sweep
from stalempi.simulate.timing import Limit, simulate
from stalempi.simulate.workload import Workload

__all__ = ["compare"]

_POLICIES = "bsp,asp,ssp:3,ssp:15,dssp:3:15,dssp:3:15:paper-capped,dssp:3:15:paper"
_CLAIRVOYANT = "clairvoyant"
_positive = FiniteRange(min=0, min_open=True)


@dataclass(frozen=True)
class _Setting:
    """What all runs have in common; `seconds` is the horizon of runs that do not learn."""

    source: Source
    network: Network
    recipe: Recipe | None
    seconds: float

    def run(self, label: str, seed: int) -> Outcome:
        """Makes one run in virtual time; the clairvoyant has no run, but the figures that no capped policy beats."""
        workload = self.source.make(seed, self.seconds)
        if label.startswith(_CLAIRVOYANT):
            return Outcome(self._bound(int(label.partition(":")[2]), workload, seed))
        policy = parse_policy(label)
        if self.recipe is None:
            return Outcome(Figures.of(simulate(policy, workload, limit=Limit(self.seconds), network=self.network)))
        learned = learn(policy, workload, self.recipe, seed=seed, network=self.network)
        return Outcome(Figures.of(learned.stats), tuple(learned.curve))

    def _bound(self, cap: int, workload: Workload, seed: int) -> Figures:
        """Returns the clairvoyant's figures; where the others learn, in the time that SSP takes for as many pushes."""
        seconds = self.seconds
        if self.recipe is not None:
            pushes = Limit(pushes=math.ceil(self.recipe.samples / self.recipe.batch_size))
            twin = self.source.make(seed, self.seconds)
            seconds = simulate(SSP(cap), twin, limit=pushes, network=self.network).seconds
        return clairvoyant(workload, cap, seconds=seconds, network=self.network)


@click.command()
@click.option("--policies", default=_POLICIES, show_default=True, help="Comma-separated: NAME[:OPTION...].")
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each policy.")
@source_options
@network_options
@learning_options
@click.option("--target", type=FiniteRange(0, 1), help="Accuracy whose time is measured [default: 0.95].")
@click.option("--seconds", type=_positive, help="Virtual seconds; not with --learn [default: 2000 iterations].")
@click.option("--real", is_flag=True, help="Train for real, under mpirun, with a scenario's delays as sleeps.")
@launch_options
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write table, picture and figures here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def compare(context: click.Context, /, **words: Any) -> None:
    """Compare policies over seeds, under a virtual clock or, with --real, in jobs of stalempi-bench train.

    A policy is written as bsp[:BACKUP], asp, ssp:BOUND, ssp-cached:BOUND,
    dssp:LOWER:UPPER[:CONTROLLER[:PREDICTOR]] or, with --real, allreduce. All meet the same delays. The
    row "clairvoyant" is the best that a policy under the largest bound of those compared could do if it knew the
    future.
    """
    given = options_given(context)
    refuse_idle(given)
    if "learn" in given and "seconds" in given:
        raise ConfigError("--learn compares runs of as many --samples: leave --seconds out")
    if "learn" not in given and "target" in given:
        raise ConfigError("--target is an accuracy: add --learn digits")
    real, launch = words.pop("real"), launch_from(words)
    if real:
        _check_real(given, words)
    elif launch != Launch():
        raise ConfigError("options of starting ranks are for real runs: add --real, or leave them out")
    out, as_json, seeds = words.pop("out"), words.pop("as_json"), range(words.pop("seeds"))
    target = words.pop("target") or 0.95
    labels = parse_policies(words.pop("policies"))
    if out:
        need_matplotlib()
        check_writable(out)
    if not real and (strays := [label for label in labels if not parse_policy(label).has_server]):
        raise ConfigError(f"{strays[0]} is for --real: in virtual time take bsp, which decides the same, with a server")
    runs = _real_runs(words, launch) if real else None
    if runs and launch.dry_run:
        click.echo("".join(runs.command_line(label, seed) for label in labels for seed in seeds), nl=False)
        return
    setting = _setting(words)
    with plain_warnings():
        rows = sweep(labels, seeds, _reporting(runs.run if runs else setting.run))
    if not real:  # nobody knows the future of a real run
        rows += [replace(row, is_bound=True) for row in sweep(_bounds(labels), seeds, setting.run)]
    _finish(rows, setting, target=target, out=out, as_json=as_json)


def _check_real(given: set[str], words: dict[str, Any]) -> None:
    """Raises ConfigError where a real run has no use for an option, or lacks one."""
    if "learn" not in given:
        raise ConfigError("--real trains: say on what, as in --learn digits")
    virtual = given & {"compute", "intervals", "latency_ms", "bandwidth", "service_ms", "handshakes", "link"}
    if virtual:
        raise ConfigError(f"--{virtual.pop().replace('_', '-')} is of the virtual clock: leave it out beside --real")
    if find_scenario(words["scenario"]).dies:
        raise ConfigError("--scenario dies is of the virtual clock: a lost rank ends an MPI job")


def _real_runs(words: Mapping[str, Any], launch: Launch) -> RealRuns:
    scenario = find_scenario(words["scenario"])
    options = {
        "scenario": scenario.name,
        "iteration-ms": words["iteration_ms"],
        "dataset": words["learn"],
        "data-dir": words["data_dir"],
        "evaluate-every": max(1, words["samples"] // 40),
    }
    options |= {key.replace("_", "-"): words[key] for key in ("model", "samples", "batch_size", "lr", "momentum")}
    given = [word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))]
    return RealRuns(
        1 + (words["workers"] or scenario.num_workers), [*given, "--lr-decay", words["lr_decay"], *launch_words(launch)]
    )


def _setting(words: dict[str, Any]) -> _Setting:
    seconds = words.pop("seconds")
    source, network, recipe = source_from(words), network_from(words), recipe_from(words)
    if recipe is not None:
        seconds = source.horizon(math.ceil(recipe.samples / recipe.batch_size))
    return _Setting(source, network, recipe, seconds or 2000 * source.iteration)


def _bounds(labels: list[str]) -> list[str]:
    """Returns the label of the clairvoyant under the largest bound; none if no policy has a bound."""
    bounds = [bound for label in labels if (bound := parse_policy(label).bound) is not None]
    return [f"{_CLAIRVOYANT}:{max(bounds)}"] if bounds else []


def _reporting(run: Callable[[str, int], Outcome]) -> Callable[[str, int], Outcome]:
    """Says on a terminal which run is on."""

    def reported(label: str, seed: int) -> Outcome:
        if sys.stderr.isatty():
            click.echo(f"\r\033[K{label}, seed {seed}", nl=False, err=True)
        outcome = run(label, seed)
        if sys.stderr.isatty():
            click.echo("\r\033[K", nl=False, err=True)
        return outcome

    return reported


def _finish(rows: list[Row], setting: _Setting, *, target: float, out: Path | None, as_json: bool) -> None:
    aim = target if setting.recipe else None
    title = f"{setting.source.text}, {setting.source.num_workers} workers, {len(rows[0].outcomes)} seed(s)"
    result = {"workload": title, "target": aim, "rows": [asdict(row) for row in rows]}
    if as_json:
        click.echo(json.dumps(result))
    else:
        screen = local_console()
        screen.print(title, highlight=False)
        for table in screen_tables(rows, aim, width=screen.width):
            screen.print(table, highlight=False)
    if out:
        (out / "comparison.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (out / "comparison.md").write_text(markdown(rows, aim), encoding="utf-8")
        draw(rows, title, out / "comparison.png")
        if not as_json:
            click.echo(f"written: {out}/comparison.md, .png and .json")
