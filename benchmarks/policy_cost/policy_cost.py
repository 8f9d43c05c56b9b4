"""Measures how long each policy takes to decide, at 10 to 10,000 workers."""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
import warnings

from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Continue, Decision, Policy, Push, Release

POLICIES = (
    BSP(),
    ASP(),
    SSP(3),
    SSP(15),
    CachedSSP(3),
    DSSP(3, 15),
    DSSP(3, 15, controller="moment"),
    DSSP(3, 15, controller="paper-capped"),
    DSSP(3, 15, controller="paper"),
)


def service(rng: random.Random) -> float:
    """Draws one service time (s): 1 with 20% jitter, and a stall of 6 in 3% of the iterations."""
    return max(0.1, rng.gauss(1.0, 0.2)) * (6.0 if rng.random() < 0.03 else 1.0)


def decision_times(policy: Policy, num_workers: int, pushes: int) -> list[float]:
    """Runs `policy` under a virtual clock and returns the wall time (s) of each `on_push`."""
    rng = random.Random(0)
    due: list[tuple[float, int]] = []

    def carry_out(decisions: list[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, (Release, Continue)):
                heapq.heappush(due, (now + service(rng), decision.worker))

    carry_out(policy.start(num_workers, 0.0), 0.0)
    times: list[float] = []
    for _ in range(pushes):
        now, worker = heapq.heappop(due)
        event = Push(worker, now)
        begin = time.perf_counter()
        decisions = policy.on_push(event)
        times.append(time.perf_counter() - begin)
        carry_out(decisions, now)
    return times


def cells(policy: Policy, sizes: list[int], rounds: int) -> list[str]:
    """Returns "median / mean" in microseconds for each size; the first tenth of the pushes is warm-up."""
    row = []
    for num_workers in sizes:
        times = decision_times(policy, num_workers, max(20_000, rounds * num_workers))
        times = times[len(times) // 10 :]
        row.append(f"{statistics.median(times) * 1e6:.1f} / {statistics.fmean(times) * 1e6:.1f}")
    return row


def main() -> None:
    """Prints one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1024, 10_000])
    parser.add_argument("--rounds", type=int, default=40, help="pushes per worker (at least 20,000 pushes in all)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| policy | " + " | ".join(f"{size:,} workers" for size in args.sizes) + " |")
    print("| --- |" + " ---: |" * len(args.sizes))
    for policy in POLICIES:
        print(f"| `{policy}` | " + " | ".join(cells(policy, args.sizes, args.rounds)) + " |", flush=True)


if __name__ == "__main__":
    main()
