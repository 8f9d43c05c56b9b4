"""Checks the options of policies, once, at construction."""

from __future__ import annotations

import math

from stalempi.errors import ConfigError

__all__ = ["check_number", "check_whole"]


def check_whole(name: str, value: object, *, least: int = 0) -> int:
    """Returns `value` if it is a whole number >= `least`; else ConfigError, one line that names both."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
    return value


def check_number(name: str, value: object, *, least: float = 0.0, below: float = math.inf) -> float:
    """Returns `value` if it is a number with `least` <= value < `below`; else ConfigError."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < below:
        ceiling = "" if below == math.inf else f" and below {below:g}"
        raise ConfigError(f"{name} must be a number of at least {least:g}{ceiling}, got {value!r}")
    return float(value)
