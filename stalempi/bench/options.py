"""Holds the command-line options that several subcommands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from stalempi.errors import ConfigError
from stalempi.policy import CONTROLLERS, POLICIES, Policy, make_policy

__all__ = ["FiniteRange", "parse_shares", "policy_from", "policy_options", "policy_options_with"]

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = ("bound", "lower", "upper", "controller", "predictor", "narrow", "backup")
_DEFAULTS: dict[str, dict[str, int]] = {"dssp": {"lower": 3, "upper": 15}}


class FiniteRange(click.FloatRange):
    """A range of numbers without infinity and NaN, which click's own lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Reads a number in the range."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return number


def policy_options_with(default: str) -> Callable[[F], F]:
    """Adds --policy, with this default, and the options of every policy to a click command."""
    options: list[Callable[[F], F]] = [
        click.option("--backup", type=int, help="bsp: a round goes on without the slowest BACKUP workers."),
        click.option("--narrow", metavar="BEGIN:END", help="dssp: bring UPPER down to LOWER between so many pushes."),
        click.option("--predictor", help="dssp: last, ema[:b] or mean-std[:z], of a worker's next interval."),
        click.option("--controller", type=click.Choice(list(CONTROLLERS)), help="dssp: how the threshold is chosen."),
        click.option("--upper", type=int, help="dssp: largest staleness threshold [default: 15]."),
        click.option("--lower", type=int, help="dssp: smallest staleness threshold [default: 3]."),
        click.option("--bound", type=int, help="ssp: largest gap at which a worker may start an iteration."),
        click.option("--policy", type=click.Choice(list(POLICIES)), default=default, show_default=True),
    ]

    def add(function: F) -> F:
        for option in options:
            function = option(function)
        return function

    return add


def policy_options(function: F) -> F:
    """Adds --policy and the options of every policy to a click command."""
    return policy_options_with("dssp")(function)


def policy_from(words: dict[str, Any]) -> Policy:
    """Takes the policy's options out of a command's parameters and makes the policy; ConfigError if they do not fit."""
    name = words.pop("policy")
    given = {key: value for key in _NAMES if (value := words.pop(key)) is not None}
    if "narrow" in given:
        given["narrow"] = _parse_narrow(given["narrow"])
    return make_policy(name, **{**_DEFAULTS.get(name, {}), **given})


def _parse_narrow(text: str) -> tuple[int, int]:
    try:
        begin, end = (int(word) for word in text.split(":"))
    except ValueError:
        raise ConfigError(f"--narrow takes BEGIN:END in pushes, as in 1000:5000, got {text!r}") from None
    return begin, end


def parse_shares(text: str) -> tuple[float, ...]:
    """Reads comma-separated shares between 0 and 1; ConfigError otherwise."""
    try:
        shares = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ConfigError(f"expected shares such as 0.5,0.75, got {text!r}") from None
    return shares
