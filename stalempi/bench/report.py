"""Writes down how a run went: the table on the screen, result.json and model.pt."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from stalempi.bench.progress import NARROW, console
from stalempi.errors import ConfigError
from stalempi.stats import RunStats
from stalempi.version import __version__

__all__ = ["check_writable", "environment", "print_summary", "write_json", "write_results"]


def check_writable(folder: Path, option: str = "--out") -> None:
    """Makes `folder` where it is missing; ConfigError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".stalempi-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be written ({error.strerror}): choose another folder") from None


def environment(library: str) -> dict[str, str | int]:
    """Returns what a result depends on besides its options; `library` is the MPI in use."""
    return {
        "stalempi": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi": library,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
    }


def print_summary(stats: RunStats, headline: Mapping[str, str]) -> None:
    """Prints the headline figures and a row per worker to stdout."""
    screen = console(sys.stdout)
    wide = ("worker", "iterations", "samples/s", "waiting", "gap mean/max", "staleness")
    narrow = ("#", "iter.", "smp/s", "wait", "gap/max", "stale")
    table = Table(box=None, pad_edge=False)
    for heading in narrow if screen.width < NARROW else wide:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, worker in enumerate(stats.workers):
        r = worker.report()
        table.add_row(
            str(number),
            str(r["iterations"]),
            f"{r['samples_per_second']:.0f}",
            f"{100 * r['wait_share']:.0f}%",
            f"{r['gap_mean']:.2f}/{r['gap_max']}",
            f"{r['staleness_mean']:.2f}",
        )
    screen.print(table, highlight=False)
    for key, value in headline.items():
        screen.print(f"{key}: {value}", highlight=False, soft_wrap=True)


def write_results(folder: Path, result: Mapping[str, object], model: nn.Module) -> None:
    """Writes `folder`/model.pt (a state_dict) and, after it, `folder`/result.json; each is whole or absent."""
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    partial = folder / "model.pt.partial"
    torch.save(state, partial)
    partial.replace(folder / "model.pt")
    write_json(folder / "result.json", result)


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """Writes a file that is whole or absent."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
