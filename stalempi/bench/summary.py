"""Is stalempi-bench summary: one table of many finished runs, as of a sweep."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from stalempi.bench.real import figures_of
from stalempi.bench.table import screen_tables
from stalempi.bench.virtual import local_console
from stalempi.errors import ConfigError, StalempiError
from stalempi.simulate.sweep import Outcome, Row
from stalempi.train.evaluate import Point

__all__ = ["read_rows", "summary"]

# What tells runs of one row apart, and where they lie; anything else that differs makes another row.
_NOT_IN_LABEL = {"policy", "seed", "out", "trace"}
_FIGURES = ("gradients_per_second", "updates_per_second", "wait_share", "gap_mean", "staleness_mean")


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--target", type=click.FloatRange(0, 1), default=0.95, show_default=True, help="Accuracy to time.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def summary(folders: tuple[Path, ...], target: float, as_csv: bool, as_json: bool) -> None:
    """Sum up the runs of train in FOLDERS (their --out): a row for each policy, over its seeds.

    Runs that differ in another option too have rows of their own. Ends with code 1 where a folder has no result.json.
    """
    if as_csv and as_json:
        raise ConfigError("give one of --csv and --json")
    found = [folder for folder in folders if (folder / "result.json").is_file()]
    rows = read_rows(found)
    if as_json:
        click.echo(json.dumps({"target": target, "rows": [asdict(row) for row in rows]}))
    elif as_csv:
        click.echo(_csv(rows, target), nl=False)
    elif rows:
        screen = local_console()
        for table in screen_tables(rows, target, width=screen.width):
            screen.print(table, highlight=False)
    if missing := [str(folder) for folder in folders if folder not in found]:
        raise StalempiError(f"{len(missing)} of {len(folders)} runs have no result.json: {', '.join(missing)}")


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """Returns a row for each policy (and other options that differ) of the runs in `folders`, in their order.

    Raises ConfigError for a result.json that stalempi-bench train did not write.
    """
    results = [_read(folder / "result.json") for folder in folders]
    varied = _varied([options for options, _ in results])
    rows: dict[str, list[Outcome]] = {}
    for options, outcome in results:
        words = [str(options["policy"]), *(f"{key}={options.get(key)}" for key in varied)]
        rows.setdefault(" ".join(words), []).append(outcome)
    return [Row(label, tuple(outcomes)) for label, outcomes in rows.items()]


def _read(path: Path) -> tuple[Mapping[str, Any], Outcome]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        outcome = Outcome(figures_of(result), tuple(Point(**point) for point in result["curve"]))
        options: Mapping[str, Any] = result["options"]
        if "policy" not in options:
            raise KeyError("policy")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not the result of a stalempi-bench train ({type(error).__name__}: {error})"
        ) from None
    return options, outcome


def _varied(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the options in which the runs differ, without those that make no row."""
    names = dict.fromkeys(name for one in options for name in one if name not in _NOT_IN_LABEL)
    return [name for name in names if len({json.dumps(one.get(name)) for one in options}) > 1]


def _csv(rows: Sequence[Row], target: float) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    within = [f"{what}_to_{target:g}" for what in ("seconds", "samples")]
    writer.writerow(["policy", "seeds", *_FIGURES, "gap_max", *within, "accuracy", "accuracy_95"])
    for row in rows:
        until = [row.until(target, what) for what in ("seconds", "samples")]
        accuracy = row.final_accuracy()
        known = [] if accuracy is None else [accuracy.mean, "" if math.isnan(accuracy.half) else accuracy.half]
        figures = [row.mean(name) for name in _FIGURES]
        times = [interval.mean if interval else "" for interval in until]
        writer.writerow([row.label, len(row.outcomes), *figures, row.largest_gap(), *times, *known])
    return text.getvalue()
