"""Starts this program again under mpirun, unless a launcher has already started it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from stalempi.bench.launchers import Hosts, command_flags, find_launcher, find_vendor, read_hostfile, share_out
from stalempi.errors import ConfigError

__all__ = [
    "Launch",
    "find_launcher",
    "is_launched",
    "launch_command",
    "launch_from",
    "launch_options",
    "launch_words",
    "relaunch",
]

F = TypeVar("F", bound=Callable[..., Any])

# Set by the launchers of Open MPI, MPICH and its kin, Intel MPI and PMIx; by us for the ranks that we start.
_MARKS = ("STALEMPI_LAUNCHED", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")

# What a rank on another node needs to find the same Python, packages and libraries.
_FORWARDED = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MPI4PY_LIBMPI")

_OPTIONS = {
    "--hosts": "hosts",
    "--hostfile": "hostfile",
    "--bind-to": "bind_to",
    "--env": "env",
    "--mpi-args": "mpi_args",
    "--launcher": "launcher",
    "--dry-run": "dry_run",
}
_BINDINGS = ("none", "core", "socket", "numa")


def launch_options(function: F) -> F:
    """Adds to a click command the options of starting ranks, beside its own -n; take them out with `launch_from`."""
    path = click.Path(path_type=Path)
    for option in (
        click.option("--dry-run", is_flag=True, help="Print the launcher's command line and end."),
        click.option("--launcher", type=path, help="mpirun or mpiexec to use [default: of this Python, then PATH]."),
        click.option("--mpi-args", default="", metavar="WORDS", help="More flags for the launcher, in one string."),
        click.option(
            "--env", multiple=True, metavar="NAME[=VALUE]", help="Variable that ranks are to have. Repeatable."
        ),
        click.option("--bind-to", type=click.Choice(_BINDINGS), help="Tie each rank to one [default: none]."),
        click.option("--hostfile", type=path, help="Nodes to start on, in the launcher's own format."),
        click.option("--hosts", metavar="HOST[:N],...", help="Nodes to start on, N ranks each [default: even shares]."),
    ):
        function = option(function)
    return function


@dataclass(frozen=True)
class Launch:
    """How ranks are to be started; see the help of `launch_options`."""

    hosts: str | None = None
    hostfile: Path | None = None
    bind_to: str | None = None
    env: tuple[str, ...] = ()
    mpi_args: str = ""
    launcher: Path | None = None
    dry_run: bool = False
    more: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.hosts and self.hostfile:
            raise ConfigError("give one of --hosts and --hostfile: both say where ranks are to start")
        if self.hosts:
            Hosts.parse(self.hosts)
        if self.launcher and not shutil.which(self.launcher):
            raise ConfigError(f"--launcher {self.launcher} is not a program: give the path of an mpirun or mpiexec")
        for word in self.env:
            self._variable(word)
        try:
            object.__setattr__(self, "more", tuple(shlex.split(self.mpi_args)))
        except ValueError as error:
            raise ConfigError(f"--mpi-args {self.mpi_args!r} cannot be read ({error}): mind the quotes") from None

    @property
    def is_remote(self) -> bool:
        """Returns whether ranks may start on other nodes."""
        return bool(self.hosts or self.hostfile) or in_allocation()

    def variables(self) -> dict[str, str]:
        """Returns the variables to hand to the ranks by flags: the user's, and on other nodes what finds our Python."""
        names = [name for name in _FORWARDED if name in os.environ]
        names += sorted(name for name in os.environ if name.startswith("STALEMPI_"))
        forwarded = {name: os.environ[name] for name in names} if self.is_remote else {}
        return forwarded | dict(self._variable(word) for word in self.env)

    @staticmethod
    def _variable(word: str) -> tuple[str, str]:
        name, given, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--env takes NAME or NAME=VALUE, got {word!r}")
        if not given and name not in os.environ:
            raise ConfigError(f"--env {name}: there is no such variable here; set it or give {name}=VALUE")
        return name, value if given else os.environ[name]


def in_allocation() -> bool:
    """Returns whether a batch system gave us nodes, and so says how many ranks a node takes."""
    return any(name in os.environ for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))


def is_launched(environment: Mapping[str, str]) -> bool:
    """Returns whether a launcher started this process as one of its ranks."""
    return any(mark in environment for mark in _MARKS)


def launch_from(words: dict[str, Any]) -> Launch:
    """Takes the options of `launch_options` out of a command's parameters; ConfigError where they have no use."""
    taken = {name: words.pop(name) for name in _OPTIONS.values()}
    if is_launched(os.environ):
        for option, name in _OPTIONS.items():
            if taken[name]:
                raise ConfigError(f"{option} is for starting ranks, and a launcher has started this one: leave it out")
    return Launch(**taken)


def launch_words(launch: Launch) -> list[str]:
    """Returns the words that give another command the same options, but for --dry-run."""
    given = {option: getattr(launch, name) for option, name in _OPTIONS.items() if option not in ("--env", "--dry-run")}
    words = [word for option, value in given.items() if value for word in (option, str(value))]
    return words + [f"--env={word}" for word in launch.env]


def launch_command(launcher: Path, ranks: int, program: Sequence[str], launch: Launch | None = None) -> list[str]:
    """Returns the command line that starts `ranks` ranks of `program`, with the flags that this launcher needs here.

    Raises ConfigError where the launcher is none, or cannot do what is asked for.
    """
    launch = launch or Launch()
    vendor = find_vendor(launcher)
    hosts = Hosts.parse(launch.hosts) if launch.hosts else None
    if launch.hostfile:
        hosts = read_hostfile(launch.hostfile, vendor)
    if hosts and not in_allocation():
        hosts.check_reachable(launch.more)
    flags = [str(launcher), *command_flags(vendor, ranks, launch.bind_to, plain=hosts is None and not in_allocation())]
    flags += vendor.variables(launch.variables())
    if launch.hostfile:
        flags += [vendor.hostfile_flag, str(launch.hostfile)]
    flags += launch.more
    shares = share_out(hosts, ranks) if hosts and not launch.hostfile else None
    return flags + vendor.place(ranks, shares, list(program))


def relaunch(ranks: int, arguments: Sequence[str], launch: Launch | None = None) -> None:
    """Replaces this process by the launcher of `ranks` ranks of stalempi-bench; returns only after a dry run.

    Args:
        arguments: of stalempi-bench; the options of `launch_options` among them are left out.
    """
    launch = launch or Launch()
    launcher = find_launcher(launch.launcher)
    program = [sys.executable, "-m", "stalempi.bench", *_without_launch(arguments)]
    command = launch_command(launcher, ranks, program, launch)
    if launch.dry_run:
        click.echo(shlex.join(command))
        return
    environment = {**os.environ, "STALEMPI_LAUNCHED": "1"}
    if sys.stderr.isatty():
        environment["STALEMPI_TERMINAL"] = str(shutil.get_terminal_size().columns)
    sys.stdout.flush()
    os.execve(launcher, command, environment)


def _without_launch(arguments: Sequence[str]) -> list[str]:
    """Leaves out the options of `launch_options`, which the ranks have no use for."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in _OPTIONS:
            if word != "--dry-run":
                next(words)
        elif word.partition("=")[0] not in _OPTIONS:
            kept.append(word)
    return kept
