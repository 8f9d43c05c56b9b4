"""Makes the tables of docs/scaling.md: where the server saturates, by formula, simulated and measured.

    python benchmarks/scaling/scaling.py [--measured]

Letters: n workers, t seconds of computing an iteration, P bytes of a push and of a release, B bytes/s of the server's
link in each direction, a seconds of the server's work on a push, l seconds of latency.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stalempi.bench.launch import find_launcher, launch_command
from stalempi.policy import ASP, BSP, DSSP, Policy
from stalempi.simulate.figures import Figures
from stalempi.simulate.network import Network
from stalempi.simulate.scenarios import find_scenario
from stalempi.simulate.timing import Limit, simulate


@dataclass(frozen=True)
class Job:
    """One model on one kind of machine; see the letters above."""

    name: str
    t: float
    P: float
    B: float = 12.5e9
    a: float = 0.0
    l: float = 1e-5  # noqa: E741 - the letter of the page

    @property
    def alone(self) -> float:
        """T_0 = t + 2 l + 2 P/B + a: seconds of an iteration of a worker that has the server for itself."""
        return self.t + 2 * self.l + 2 * self.P / self.B + self.a

    @property
    def ceiling(self) -> float:
        """C = 1 / max(P/B, a): pushes per second of a server that is never idle."""
        return 1 / max(self.P / self.B, self.a)

    def rate(self, n: int) -> float:
        """X(n) <= min(n / T_0, C): pushes per second of n workers of which none waits for another."""
        return min(n / self.alone, self.ceiling)

    def most_workers(self) -> float:
        """n* = C T_0: workers beyond which more add nothing."""
        return self.ceiling * self.alone

    def servers(self, n: int) -> int:
        """S = ceil(n / n*): servers, each with a part of the parameters, that n workers would keep busy."""
        return math.ceil(n / self.most_workers())

    def simulated(self, policy: Policy, n: int, pushes: int) -> Figures:
        """Plays n workers whose iterations vary by 10%."""
        workload = find_scenario("jitter").workload(n, seed=0, horizon=1.0, unit=self.t)
        size = round(self.P)
        network = Network(latency=self.l, bandwidth=self.B, push_bytes=size, release_bytes=size, service=self.a)
        return Figures.of(simulate(policy, workload, limit=Limit(pushes=pushes), network=network))


# 100 Gbit/s; the server's work: 5 floats of memory traffic for each parameter at 100 GB/s (SGD with momentum)
JOBS = (
    Job("ResNet-20, CIFAR", t=0.02, P=1.1e6, a=5.5e-5),
    Job("ResNet-50", t=0.25, P=102e6, a=5.1e-3),
    Job("VGG-16", t=0.4, P=553e6, a=27.7e-3),
    Job("BERT-base", t=0.3, P=440e6, a=22e-3),
)
SIZES = (1, 4, 16, 64, 256, 1_000, 10_000)


def table_of_needs() -> None:
    """Prints how many workers a server bears."""
    print("| model | t, ms | P, MB | 25 Gbit/s: C | n* | 100 Gbit/s: C | n* | servers for 256 workers |")
    print("| --- |" + " ---: |" * 7)
    for job in JOBS:
        slow = Job(job.name, job.t, job.P, 3.125e9, job.a)
        cells = f"{1e3 * job.t:.0f} | {job.P / 1e6:.0f} | {slow.ceiling:.1f} | {slow.most_workers():.1f}"
        print(f"| {job.name} | {cells} | {job.ceiling:.1f} | {job.most_workers():.1f} | {job.servers(256)} |")


def table_of_simulations() -> None:
    """Prints the formula beside the simulator."""
    print("| model | workers | formula, pushes/s | ASP | DSSP(3, 15) | BSP | ASP / formula |")
    print("| --- |" + " ---: |" * 6)
    for job in JOBS[:2]:
        for n in SIZES:
            pushes = max(2_000, 12 * n)
            rates = [job.simulated(policy, n, pushes).gradients_per_second for policy in (ASP(), DSSP(3, 15), BSP())]
            cells = " | ".join(f"{rate:.1f}" for rate in rates)
            print(f"| {job.name} | {n} | {job.rate(n):.1f} | {cells} | {rates[0] / job.rate(n):.2f} |", flush=True)


def served(parameters: int, n: int, pause: float, seconds: float) -> float:
    """Measures the pushes per second of a real server."""
    program = [sys.executable, str(Path(__file__).with_name("served.py")), str(parameters), str(pause), str(seconds)]
    command = launch_command(find_launcher(), n + 1, program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    return float(done.stdout)


def table_of_measurements(parameters: int, t: float, sizes: tuple[int, ...]) -> None:
    """Prints the formula beside a real server; T_0 is measured with one worker, C with as many as never sleep."""
    alone = 1 / served(parameters, 1, t, 4)
    ceiling = served(parameters, 3, 0.0, 4)
    sizes_of = f"P = {4 * parameters / 1e6:.1f} MB, t = {1e3 * t:.0f} ms (sleep)"
    print(f"{sizes_of}: T_0 = {1e3 * alone:.1f} ms, C = {ceiling:.0f}/s")
    print("\n| workers | formula, pushes/s | measured | measured / formula |\n| ---: | ---: | ---: | ---: |")
    for n in sizes:
        expected = min(n / alone, ceiling)
        found = served(parameters, n, t, 4)
        print(f"| {n} | {expected:.1f} | {found:.1f} | {found / expected:.2f} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", action="store_true", help="measure the server of this machine")
    if parser.parse_args().measured:
        table_of_measurements(100_000, 0.01, (2, 4))
        return
    table_of_needs()
    print()
    table_of_simulations()


if __name__ == "__main__":
    main()
