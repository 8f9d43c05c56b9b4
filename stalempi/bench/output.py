"""Holds the options of what a run tells and writes, which every command that trains takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from stalempi.bench.options import FiniteRange
from stalempi.bench.report import check_writable
from stalempi.errors import ConfigError
from stalempi.logs import LEVELS

__all__ = ["check_output", "output_options"]

F = TypeVar("F", bound=Callable[..., Any])

_file = click.Path(path_type=Path, dir_okay=False)
_folder = click.Path(path_type=Path, file_okay=False)


class Output(Protocol):
    """What these options become."""

    @property
    def trace(self) -> Path | None:
        """Of --trace."""

    @property
    def metrics(self) -> Path | None:
        """Of --metrics."""

    @property
    def tensorboard(self) -> Path | None:
        """Of --tensorboard."""

    @property
    def out(self) -> Path | None:
        """Of --out."""


def output_options(*, trace: str) -> Callable[[F], F]:
    """Returns what adds these options to a click command; `trace` says what --trace writes."""
    options = (
        click.option("--trace", type=_file, help=trace),
        click.option(
            "--log-interval",
            type=FiniteRange(min=0, min_open=True),
            default=5.0,
            show_default=True,
            help="Seconds from line to line.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(LEVELS),
            help="Of every rank [default: info on rank 0, warning on the others].",
        ),
        click.option(
            "--metrics",
            type=_file,
            help="Write a JSON line every --log-interval to this file [default: metrics.jsonl in --out].",
        ),
        click.option("--tensorboard", type=_folder, help="Write the same for TensorBoard."),
        click.option("--out", type=_folder, help="Write result.json and model.pt here."),
    )

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def check_output(output: Output) -> None:
    """Raises ConfigError if a place to write to is none; makes the folders that are missing."""
    if output.out:
        check_writable(output.out)
    if output.tensorboard:
        check_writable(output.tensorboard, "--tensorboard")
    for name, file in (("--trace", output.trace), ("--metrics", output.metrics)):
        if file and not file.parent.is_dir():
            raise ConfigError(f"{name} {file}: there is no folder {file.parent}; make it or choose another")
