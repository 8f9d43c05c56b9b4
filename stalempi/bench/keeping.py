"""Holds the options of checkpoints, which every command that trains takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from stalempi.bench.options import FiniteRange
from stalempi.errors import ConfigError
from stalempi.train.keeper import Checkpoint

__all__ = ["checkpoint_from", "checkpoint_options"]

F = TypeVar("F", bound=Callable[..., Any])


def checkpoint_options(function: F) -> F:
    """Adds these options to a click command."""
    for option in reversed(
        (
            click.option(
                "--checkpoint-dir",
                type=click.Path(path_type=Path, file_okay=False),
                help="Save the run in this folder.",
            ),
            click.option(
                "--checkpoint-every",
                metavar="SAMPLES|SECONDSs",
                help="Save so often, as in 5000 or 30s [default: at the end, and when a signal ends the job].",
            ),
            click.option(
                "--checkpoint-keep",
                type=click.IntRange(min=1),
                default=2,
                show_default=True,
                help="Checkpoints to keep.",
            ),
            click.option(
                "--resume",
                default="auto",
                show_default=True,
                metavar="auto|no|PATH",
                help="Go on from the newest in --checkpoint-dir, if there is one; start fresh; or go on from PATH.",
            ),
            click.option(
                "--grace",
                type=FiniteRange(min=0, min_open=True),
                default=60.0,
                show_default=True,
                help="Seconds from SIGTERM or SIGUSR1 to a hard end; the job saves and stops before, with code 75.",
            ),
        )
    ):
        function = option(function)
    return function


def checkpoint_from(words: dict[str, Any]) -> Checkpoint | None:
    """Takes the options of checkpoints (but --grace) out of a command's; ConfigError if they do not fit together."""
    folder, every, keep, resume = (
        words.pop(key) for key in ("checkpoint_dir", "checkpoint_every", "checkpoint_keep", "resume")
    )
    if folder is None:
        if every is not None or resume != "auto":
            raise ConfigError("--checkpoint-every and --resume need --checkpoint-dir: the folder of this run")
        return None
    checkpoint = Checkpoint(folder, every=every, keep=keep, resume=resume)
    checkpoint.find()
    return checkpoint
