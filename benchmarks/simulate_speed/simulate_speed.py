"""Measures how long the timing-only simulator takes for a push, at 10 to 10,000 workers."""

from __future__ import annotations

import argparse
import time

from stalempi.policy import ASP, BSP, DSSP, SSP, Policy
from stalempi.simulate.network import Network
from stalempi.simulate.scenarios import find_scenario
from stalempi.simulate.timing import Limit, simulate

POLICIES: tuple[Policy, ...] = (ASP(), BSP(), SSP(15), DSSP(3, 15))
NETWORK = Network(latency=0.001, bandwidth=1e9, push_bytes=1000, release_bytes=1000, service=1e-6)


def cost(policy: Policy, num_workers: int, pushes: int) -> tuple[float, int]:
    """Returns the processor time (s) of a whole run and the pushes in it."""
    workload = find_scenario("stalls").workload(num_workers, seed=0, horizon=1.0)
    begin = time.process_time()
    stats = simulate(policy, workload, limit=Limit(pushes=pushes), network=NETWORK)
    return time.process_time() - begin, sum(worker.iterations for worker in stats.workers)


def main() -> None:
    """Prints one Markdown table: seconds of the run, and microseconds per push."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--pushes", type=int, default=1_000_000)
    args = parser.parse_args()
    print("| policy | " + " | ".join(f"{size:,} workers" for size in args.sizes) + " |")
    print("| --- |" + " ---: |" * len(args.sizes))
    for policy in POLICIES:
        cells = []
        for size in args.sizes:
            seconds, pushes = cost(policy, size, args.pushes)
            cells.append(f"{seconds:.1f} s / {1e6 * seconds / pushes:.1f}")
        print(f"| `{policy}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
