"""Is what doctor says of one thing: how it stands, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import click

__all__ = ["Finding", "Level", "as_json", "fail", "ok", "show", "warn", "worst"]


class Level(IntEnum):
    """How a thing stands: well, worth a look, or so that training will fail; doctor's exit code."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True)
class Finding:
    """One line of doctor: what was looked at, how it stands, what was seen, and what to do about it."""

    name: str
    level: Level
    said: str
    cure: str = ""


def ok(name: str, said: str) -> Finding:
    """Returns a finding of something that is as it should be."""
    return Finding(name, Level.OK, said)


def warn(name: str, said: str, cure: str) -> Finding:
    """Returns a finding of something that costs time or may fail."""
    return Finding(name, Level.WARN, said, cure)


def fail(name: str, said: str, cure: str) -> Finding:
    """Returns a finding of something that makes training fail."""
    return Finding(name, Level.FAIL, said, cure)


def worst(findings: Sequence[Finding]) -> Level:
    """Returns the worst level there is."""
    return max((finding.level for finding in findings), default=Level.OK)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the findings as doctor --json prints them."""
    lines = [{"name": f.name, "level": f.level.name.lower(), "said": f.said, "cure": f.cure} for f in findings]
    return {"worst": worst(findings).name.lower(), "findings": lines}


def show(findings: Sequence[Finding]) -> None:
    """Prints a line for each finding, coloured on a terminal, and below it what to do."""
    wide = max(len(finding.name) for finding in findings)
    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
    words = {Level.OK: "ok  ", Level.WARN: "warn", Level.FAIL: "FAIL"}
    for finding in findings:
        word = click.style(words[finding.level], fg=colours[finding.level], bold=finding.level is not Level.OK)
        click.echo(f"{word}  {finding.name:{wide}}  {finding.said}")
        if finding.cure:
            click.echo(f"      {'':{wide}}  -> {finding.cure}")
