"""Holds the options of how pushes and releases travel, which several subcommands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from stalempi.bench.options import FiniteRange
from stalempi.compress import COMPRESSIONS, make_compression
from stalempi.errors import ConfigError
from stalempi.policy import Policy
from stalempi.replica import DEFAULT_BUCKET_BYTES
from stalempi.worker import OVERLAPS

__all__ = ["Wire", "wire_from", "wire_options"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Wire:
    """How messages travel; the names are those of `DistributedOptimizer`."""

    overlap: str
    run_ahead: bool
    early_forward: bool
    compress: str
    bucket_mb: float

    def __post_init__(self) -> None:
        make_compression(self.compress)

    def options(self) -> dict[str, Any]:
        """Returns them as `DistributedOptimizer` takes them."""
        return {
            "overlap": self.overlap,
            "run_ahead": self.run_ahead,
            "early_forward": self.early_forward,
            "compression": self.compress,
            "bucket_bytes": round(self.bucket_mb * 2**20),
        }

    def check(self, policy: Policy) -> None:
        """Raises ConfigError if messages cannot travel so under `policy`."""
        if self.compress != "none" and not policy.has_server:
            raise ConfigError(f"--compress {self.compress}: MPI adds up under {policy.name}, and cannot read it")


def wire_options(function: F) -> F:
    """Adds the options to a click command."""
    for option in (
        click.option(
            "--bucket-mb",
            type=FiniteRange(min=2**-14, max=1024),
            default=DEFAULT_BUCKET_BYTES / 2**20,
            show_default=True,
            help="MiB that one message carries.",
        ),
        click.option(
            "--compress", default="none", show_default=True, metavar="FORM", help=f"Of pushes: {COMPRESSIONS}."
        ),
        click.option(
            "--early-forward", is_flag=True, help="Begin forward with the parameters that are there, the rest arriving."
        ),
        click.option(
            "--run-ahead", is_flag=True, help="Begin an iteration before the last release; one more in the bound."
        ),
        click.option(
            "--overlap",
            type=click.Choice(list(OVERLAPS)),
            default="thread",
            show_default=True,
            help="How gradients are sent while backward makes them.",
        ),
    ):
        function = option(function)
    return function


def wire_from(words: dict[str, Any]) -> Wire:
    """Takes the options out of a command's parameters."""
    return Wire(**{name: words.pop(name) for name in Wire.__dataclass_fields__})
