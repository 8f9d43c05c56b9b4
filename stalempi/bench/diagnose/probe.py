"""Asks dangerous questions in a process of their own, which may crash or hang and is ended at its time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Answer", "ask", "unlaunched"]

# What makes a process believe that it is a rank; settings of an MPI stay.
_OF_RANKS = ("OMPI_COMM_", "OMPI_UNIVERSE", "OMPI_FILE", "PMI_", "PMIX_", "PRTE_LAUNCHED", "SLURM_", "MPI_LOCAL")


@dataclass(frozen=True)
class Answer:
    """What a process said and how it ended; `code` is None if it had to be ended."""

    code: int | None
    facts: dict[str, Any]
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """Returns the line on stderr that says most: the last of a traceback, else the first."""
        lines = [line.strip() for line in self.err.splitlines() if any(c.isalnum() for c in line)]
        ended = f"killed by signal {-self.code}" if self.code and self.code < 0 else f"exit code {self.code}"
        place = -1 if any(line.startswith("Traceback") for line in lines) else 0
        return lines[place] if lines else f"{ended}, no message"


def unlaunched() -> dict[str, str]:
    """Returns our environment without the marks of a launcher, so that a process may start MPI alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}


def ask(command: Sequence[str | Path], *, timeout: float, env: Mapping[str, str] | None = None) -> Answer:
    """Runs a command, or a script of this folder by its path, and returns what it answered.

    Each line of its stdout that is a JSON object adds to the facts, so that what was known before a crash stays known.
    """
    words = [sys.executable, *map(str, command)] if str(command[0]).endswith(".py") else list(map(str, command))
    try:
        process = subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Answer(127, {}, "", str(error))
    code: int | None
    try:
        out, err = process.communicate(timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = process.communicate()
        code = None
    return Answer(code, _facts(out), out, err)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process and its children: a launcher is asked first, since it ends its ranks on other nodes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)


def _facts(out: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line) if line.startswith("{") else {}
            facts |= found
    return facts
