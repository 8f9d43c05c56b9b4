"""Runs real MPI jobs for tests, each with a time limit that ends all of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stalempi.bench.launch import find_launcher, launch_command

__all__ = ["MPICH", "Finished", "Running", "mpirun", "start"]

# A second MPI beside the environment's own; scripts/test puts it there.
MPICH = os.environ.get("STALEMPI_MPICH")


@dataclass(frozen=True)
class Finished:
    """How a job ended; `code` is None if it had to be ended at its time limit."""

    code: int | None
    out: str
    err: str
    seconds: float


class Running:
    """A job that is running; leave it to `finish`, which always ends it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def finish(self, timeout: float) -> Finished:
        """Waits up to `timeout` seconds in all, then ends whatever is left of the job."""
        code: int | None
        try:
            out, err = self.process.communicate(timeout=max(0.1, timeout - (time.monotonic() - self._began)))
            code = self.process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGTERM)
            time.sleep(1)
            os.killpg(self.process.pid, signal.SIGKILL)
            out, err = self.process.communicate()
            code = None
        return Finished(code, out, err, time.monotonic() - self._began)


def start(
    program: Path | Sequence[str],
    ranks: int,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    mpich: bool = False,
) -> Running:
    """Starts `ranks` ranks of a Python script (or of words for the interpreter) under plain mpirun."""
    words = [str(program)] if isinstance(program, Path) else list(program)
    launcher = Path(MPICH or "", "bin/mpiexec") if mpich else find_launcher()
    command = launch_command(launcher, ranks, [sys.executable, *words, *arguments])
    command[1:1] = flags
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "STALEMPI_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    if mpich:
        environment["MPI4PY_LIBMPI"] = str(Path(MPICH or "", "lib/libmpi.so.12"))
    return Running(command, environment)


def mpirun(
    program: Path | Sequence[str],
    ranks: int,
    *arguments: str,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    mpich: bool = False,
) -> Finished:
    """Runs a job to its end, see `start`, or to its time limit.

    Where several tests start jobs at the same moment, Open MPI's daemon at times does not come up: then once more.
    """
    done = start(program, ranks, *arguments, env=env, flags=flags, mpich=mpich).finish(timeout)
    if "PMIx server's listener thread failed to start" in done.err:
        done = start(program, ranks, *arguments, env=env, flags=flags, mpich=mpich).finish(timeout)
    return done
