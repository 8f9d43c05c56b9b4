"""Knows the launchers of the MPI libraries, and the flags by which each is told the same thing."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stalempi.errors import ConfigError

__all__ = ["Hosts", "Vendor", "command_flags", "find_launcher", "find_vendor", "read_hostfile", "share_out"]

Shares = list[tuple[str, int]]


def find_launcher(given: Path | None = None) -> Path:
    """Returns the mpirun or mpiexec of this Python environment, else the first on PATH.

    `given`, or else the variable STALEMPI_MPIEXEC, names another one. Raises ConfigError if there is none.
    """
    named = str(given) if given else os.environ.get("STALEMPI_MPIEXEC")
    beside = Path(sys.executable).parent
    for candidate in [named] if named else [str(beside / "mpirun"), str(beside / "mpiexec"), "mpirun", "mpiexec"]:
        if found := shutil.which(candidate):
            return Path(found).absolute()
    if named:
        raise ConfigError(f"STALEMPI_MPIEXEC={named} is not a program")
    raise ConfigError("no mpirun or mpiexec found: load your site's MPI module, or pip install 'stalempi[mpi]'")


@dataclass(frozen=True)
class Vendor:
    """A family of launchers: "openmpi", "mpich" (and its kin) or "intel", and the major version if it says one."""

    name: str
    major: int = 0

    @property
    def title(self) -> str:
        """For people: Open MPI 5."""
        titles = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}
        return f"{titles[self.name]} {self.major or ''}".strip()

    @property
    def hostfile_flag(self) -> str:
        """What a file of nodes is given by."""
        return {"openmpi": "--hostfile", "mpich": "-f", "intel": "-machinefile"}[self.name]

    def bind(self, to: str) -> list[str]:
        """Returns the flags that tie each rank to a core, socket or numa node, or to nothing."""
        if self.name == "intel":
            return ["-genv", "I_MPI_PIN", "off"] if to == "none" else ["-genv", "I_MPI_PIN_DOMAIN", to]
        if self.name == "mpich":
            return ["-bind-to", to]
        return ["--bind-to", "package" if to == "socket" and self.major >= 5 else to]

    def variables(self, values: Mapping[str, str]) -> list[str]:
        """Returns the flags that give each rank these variables."""
        if self.name == "openmpi":
            # by name where it can be: Open MPI 4 takes values apart at each semicolon
            pairs = [name if os.environ.get(name) == value else f"{name}={value}" for name, value in values.items()]
            return [word for pair in pairs for word in ("-x", pair)]
        return [word for name, value in values.items() for word in ("-genv", name, value)]

    def place(self, ranks: int, shares: Shares | None, program: list[str]) -> list[str]:
        """Returns the last words: how many ranks of `program`, and on which nodes."""
        if shares is None:
            return ["-n", str(ranks), *program]
        if self.name == "intel":  # its -hosts takes no counts, so each node is a part of its own
            parts = [["-n", str(count), "-host", host, *program] for host, count in shares]
            return [word for part in parts for word in (":", *part)][1:]
        text = ",".join(f"{host}:{count}" for host, count in shares)
        return ["--host" if self.name == "openmpi" else "-hosts", text, "-n", str(ranks), *program]


def find_vendor(launcher: Path) -> Vendor:
    """Asks a launcher what it is; ConfigError if it cannot be run."""
    try:
        said = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{launcher} --version fails ({error}): is it an MPI launcher?") from None
    text = said.stdout + said.stderr
    number = re.search(r"\b(\d+)\.\d+", text)
    major = int(number[1]) if number else 0
    if "PRTE" in text:
        return Vendor("openmpi", 5)  # counts by itself, and comes with Open MPI 5
    if "Open MPI" in text or "Open RTE" in text or "OpenRTE" in text:
        return Vendor("openmpi", major)
    return Vendor("intel" if "Intel" in text else "mpich", major)


def command_flags(vendor: Vendor, ranks: int, bind_to: str | None, *, plain: bool) -> list[str]:
    """Returns the flags that `vendor` needs here; `plain`: all ranks on this machine, and nobody counts its places."""
    if vendor.name != "openmpi":
        return vendor.bind(bind_to) if bind_to else []
    flags = vendor.bind(bind_to or "none")  # a rank bound to one core has no threads for its data and its sums
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    if plain and ranks > physical_cores():
        flags.append("--oversubscribe")
    return flags


def physical_cores() -> int:
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


@dataclass(frozen=True)
class Hosts:
    """Nodes in order, and how many ranks each takes where that was said."""

    counts: tuple[tuple[str, int | None], ...]

    @classmethod
    def parse(cls, text: str) -> Hosts:
        """Reads HOST[:N],...; ConfigError otherwise."""
        found: list[tuple[str, int | None]] = []
        for word in text.split(","):
            host, given, count = word.strip().partition(":")
            if not re.fullmatch(r"[\w.-]+", host) or (given and not (count.isdigit() and int(count) > 0)):
                raise ConfigError(f"--hosts takes HOST[:N],... as in n1:2,n2:2, got {word!r} in {text!r}")
            found.append((host, int(count) if given else None))
        return cls(tuple(found))

    def check_reachable(self, flags: Sequence[str]) -> None:
        """Raises ConfigError if another node is named and there is nothing by which the launcher could get there."""
        ours = {"localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().partition(".")[0]}
        others = [host for host, _ in self.counts if host not in ours]
        agents = ("rsh_agent", "ssh_agent", "HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP")
        told = any(agent in word for word in os.environ for agent in agents) or any(
            word.endswith(("rsh_agent", "ssh_agent")) or word.lstrip("-").startswith(("launcher", "bootstrap"))
            for word in flags
        )
        if others and not told and not shutil.which("ssh"):
            raise ConfigError(
                f"no ssh on PATH, by which the launcher reaches {others[0]}: install it, name another remote shell "
                "with --mpi-args, or run inside an allocation"
            )


def read_hostfile(path: Path, vendor: Vendor) -> Hosts:
    """Reads a file of nodes as `vendor` would; ConfigError names the line that it would not understand."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read ({error})") from None
    form = (
        r"([\w.@-]+)(?:\s+(?:slots|max[-_]slots)\s*=\s*(\d+))*" if vendor.name == "openmpi" else r"([\w.-]+)(?::(\d+))?"
    )
    example = "n1 slots=2" if vendor.name == "openmpi" else "n1:2"
    found: list[tuple[str, int | None]] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = re.fullmatch(form, words)
        if not match:
            raise ConfigError(
                f"--hostfile {path} line {number}: {vendor.title} reads lines like {example!r}, not {words!r}"
            )
        found.append((match[1], int(match[2]) if match[2] else None))
    if not found:
        raise ConfigError(f"--hostfile {path} names no node: give one a line, as in {example!r}")
    return Hosts(tuple(found))


def share_out(hosts: Hosts, ranks: int) -> Shares:
    """Says how many ranks each node gets: as given, else as even as can be, the first nodes more; ConfigError."""
    given = sum(count or 0 for _, count in hosts.counts)
    open_hosts = [host for host, count in hosts.counts if count is None]
    left = ranks - given
    if left < len(open_hosts) or (not open_hosts and left != 0):
        raise ConfigError(
            f"--hosts has places for {given} rank(s)"
            + (f" and {len(open_hosts)} node(s) more" if open_hosts else "")
            + f", but -n is {ranks}: make them agree"
        )
    shares: Shares = []
    for host, count in hosts.counts:
        share = -(-left // len(open_hosts)) if count is None else count
        if count is None:
            left -= share
            open_hosts.pop()
        shares.append((host, share))
    return shares
