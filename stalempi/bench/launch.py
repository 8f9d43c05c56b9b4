"""Starts this program again under mpirun, unless a launcher has already started it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from stalempi.errors import ConfigError

__all__ = ["find_launcher", "is_launched", "launch_command", "relaunch"]

# Set by the launchers of Open MPI, MPICH and its kin, Intel MPI and PMIx; by us for the ranks that we start.
_MARKS = ("STALEMPI_LAUNCHED", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")

# Inside an allocation the batch system says how many ranks a node takes.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def is_launched(environment: Mapping[str, str]) -> bool:
    """Returns whether a launcher started this process as one of its ranks."""
    return any(mark in environment for mark in _MARKS)


def find_launcher() -> Path:
    """Returns the mpirun or mpiexec of this Python environment, else the first on PATH.

    STALEMPI_MPIEXEC names another one. Raises ConfigError if there is none.
    """
    named = os.environ.get("STALEMPI_MPIEXEC")
    beside = Path(sys.executable).parent
    for candidate in [named] if named else [str(beside / "mpirun"), str(beside / "mpiexec"), "mpirun", "mpiexec"]:
        if found := shutil.which(candidate):
            return Path(found)
    if named:
        raise ConfigError(f"STALEMPI_MPIEXEC={named} is not a program")
    raise ConfigError("no mpirun or mpiexec found: load your site's MPI module, or pip install 'stalempi[mpi]'")


def launch_command(launcher: Path, ranks: int, program: Sequence[str]) -> list[str]:
    """Returns the command line that starts `ranks` ranks of `program`, with the flags that this launcher needs here."""
    return [str(launcher), "-n", str(ranks), *_flags(_vendor(launcher), ranks), *program]


def relaunch(ranks: int, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the launcher of `ranks` ranks of stalempi-bench with `arguments`."""
    launcher = find_launcher()
    command = launch_command(launcher, ranks, [sys.executable, "-m", "stalempi.bench", *arguments])
    environment = {**os.environ, "STALEMPI_LAUNCHED": "1"}
    if sys.stderr.isatty():
        environment["STALEMPI_TERMINAL"] = str(shutil.get_terminal_size().columns)
    sys.stdout.flush()
    os.execve(launcher, command, environment)


def _vendor(launcher: Path) -> str:
    """Returns "openmpi", or "hydra" for MPICH and its kin."""
    try:
        said = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{launcher} --version fails ({error}): is it an MPI launcher?") from None
    text = said.stdout + said.stderr
    return "openmpi" if "Open MPI" in text or "Open RTE" in text or "PRTE" in text else "hydra"


def _flags(vendor: str, ranks: int) -> list[str]:
    if vendor != "openmpi":
        return []
    flags = ["--bind-to", "none"]  # a rank bound to one core has no threads for its data and its sums
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    if not any(name in os.environ for name in _ALLOCATIONS) and ranks > _physical_cores():
        flags.append("--oversubscribe")
    return flags


def _physical_cores() -> int:
    """Counts the cores as Open MPI counts its slots: without hardware threads."""
    usable = len(os.sched_getaffinity(0))
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return usable
    blocks = [block.splitlines() for block in text.split("\n\n")]
    cores = {tuple(line for line in block if line.startswith(("physical id", "core id"))) for block in blocks}
    cores.discard(())
    return min(usable, len(cores)) or usable
