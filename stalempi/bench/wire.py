"""Holds the options of how pushes and releases travel, which several subcommands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import click

from stalempi.worker import OVERLAPS

__all__ = ["Wire", "wire_from", "wire_options"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Wire:
    """How messages travel; the names are those of `DistributedOptimizer`."""

    overlap: str
    run_ahead: bool

    def options(self) -> dict[str, Any]:
        """Returns them as `DistributedOptimizer` takes them."""
        return asdict(self)


def wire_options(function: F) -> F:
    """Adds the options to a click command."""
    for option in (
        click.option(
            "--run-ahead", is_flag=True, help="Begin an iteration before the last release; one more in the bound."
        ),
        click.option(
            "--overlap",
            type=click.Choice(list(OVERLAPS)),
            default="hooks",
            show_default=True,
            help="How gradients are sent while backward makes them.",
        ),
    ):
        function = option(function)
    return function


def wire_from(words: dict[str, Any]) -> Wire:
    """Takes the options out of a command's parameters."""
    return Wire(**{name: words.pop(name) for name in Wire.__dataclass_fields__})
