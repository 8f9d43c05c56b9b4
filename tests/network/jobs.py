"""Trains over hosts of one machine, and says how fast the simulator expects that to be."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stalempi
from stalempi.bench.launch import Launch, find_launcher, launch_command
from stalempi.bench.launchers import find_vendor
from stalempi.bench.real import figures_of
from stalempi.simulate.figures import Figures
from stalempi.simulate.network import Link, Network
from stalempi.simulate.scenarios import find_scenario
from stalempi.simulate.sweep import parse_policy
from stalempi.simulate.timing import Limit, simulate
from tests.network.hosts import Cable, Hosts

__all__ = ["Setting", "launch_over", "run_on", "train_over"]

_ROOT = str(Path(stalempi.__file__).parents[1])
_PARAMETERS = 3072 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10  # of the mlp on 3x32x32 images, float32


@dataclass(frozen=True)
class Setting:
    """Some workers of like speed, the last of them behind a cable of its own.

    Attributes:
        workers: each on a host of its own, as is the server.
        cable: of the last worker.
        iteration: mean seconds of computing (sleep), which vary by 10%.
        seed: of the draws, the same for the real run and the simulated.
        pushes: gradients that the run applies.
    """

    workers: int = 3
    cable: Cable = field(default_factory=lambda: Cable(delay=0.02, rate=12.5e6))
    iteration: float = 0.15
    seed: int = 0
    pushes: int = 150

    def hosts(self) -> Hosts:
        """Makes the hosts: the server's, and one for each worker."""
        return Hosts([Cable()] * self.workers + [self.cable])

    def measure(self, label: str, hosts: Hosts, folder: Path) -> Figures:
        """Trains under the policy that `label` says and returns what came of it."""
        policy = parse_policy(label)
        options = [word for key, value in policy.options().items() if key != "eps" for word in (f"--{key}", str(value))]
        words = ["--policy", policy.name, *options, "--model", "mlp", "--dataset", "synthetic", "--batch-size", "1"]
        words += ["--overlap", "off"]  # the virtual clock knows of no bucket that leaves during an iteration
        words += ["--scenario", "jitter", "--iteration-ms", f"{1e3 * self.iteration:g}", "--seed", str(self.seed)]
        return figures_of(train_over(hosts, folder, [*words, "--samples", str(self.pushes)]))

    def predict(self, label: str) -> Figures:
        """Plays the same under the virtual clock, over the cable as it is meant to be."""
        workload = find_scenario("jitter").workload(self.workers, seed=self.seed, horizon=1.0, unit=self.iteration)
        size = 4 * _PARAMETERS
        links = (*[Link()] * (self.workers - 1), Link(self.cable.delay, self.cable.rate))
        network = Network(push_bytes=size, release_bytes=size, handshakes=1, links=links)
        return Figures.of(simulate(parse_policy(label), workload, limit=Limit(pushes=self.pushes), network=network))


def launch_over(hosts: Hosts) -> Launch:
    """Returns how to start one rank on each of the hosts, by the launcher at hand."""
    major = find_vendor(find_launcher()).major
    agent = f"{'--prtemca plm_ssh_agent' if major >= 5 else '--mca plm_rsh_agent'} {shlex.quote(str(hosts.agent()))}"
    return Launch(hosts=",".join(f"{name}:1" for name in hosts.names), env=("OMP_NUM_THREADS=1",), mpi_args=agent)


def run_on(hosts: Hosts, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs a command on the first host, to its end or its time limit."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM"))}
    return subprocess.run(
        [*hosts.enter(hosts.names[0]), "timeout", str(timeout), *command],
        env=environment | {"PYTHONPATH": _ROOT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def train_over(
    hosts: Hosts, folder: Path, words: Sequence[str], *, command: str = "train", timeout: float = 120
) -> dict[str, Any]:
    """Runs stalempi-bench train (or pipeline) with a rank on each host, in their order; returns result.json."""
    program = [sys.executable, "-m", "stalempi.bench", command, *words, "--out", str(folder)]
    done = run_on(hosts, launch_command(find_launcher(), len(hosts.names), program, launch_over(hosts)), timeout)
    assert done.returncode == 0, done.stderr + done.stdout
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result
