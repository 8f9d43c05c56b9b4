"""Compares DSSP's controllers with every fixed threshold in all named scenarios, and says what holds."""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from stalempi.policy import ASP, BSP, DSSP, SSP, Policy
from stalempi.policy.paper import PaperController
from stalempi.simulate.clairvoyant import clairvoyant
from stalempi.simulate.figures import Figures
from stalempi.simulate.scenarios import SCENARIOS, Scenario
from stalempi.simulate.timing import Limit, simulate

LOWER, UPPER = 3, 15
DYN, CLAIRVOYANT = "dyn", f"clairvoyant({UPPER})"
FIXED = [f"SSP({s})" for s in range(LOWER, UPPER + 1)]


class Figure2(PaperController):
    """The paper's Figure 2: uncapped, and a worker without credit waits until the least count rises, not to s_L."""

    def threshold(self, worker: int, now: float) -> int:
        """Returns Algorithm 1's threshold where the worker may go on, else the one that a single rise satisfies."""
        chosen = super().threshold(worker, now)
        gap = self.clocks.gap(worker)
        return chosen if gap <= chosen else gap - 1


def figure_2() -> Policy:
    """Makes a DSSP with the controller of Figure 2, which the package does not offer."""
    policy = DSSP(LOWER, UPPER, controller="paper")
    policy.controller = Figure2(LOWER, UPPER)
    return policy


POLICIES: dict[str, Callable[[], Policy]] = {
    "BSP": BSP,
    **{f"SSP({s})": (lambda s=s: SSP(s)) for s in range(LOWER, UPPER + 1)},
    "ASP": ASP,
    "paper": lambda: DSSP(LOWER, UPPER, controller="paper"),
    "paper-figure-2": figure_2,
    "paper-capped": lambda: DSSP(LOWER, UPPER, controller="paper-capped"),
    "moment": lambda: DSSP(LOWER, UPPER, controller="moment"),
    DYN: lambda: DSSP(LOWER, UPPER),
}


@dataclass(frozen=True)
class Result:
    """Means over seeds: gradients/s, mean gap, mean staleness; and the largest gap of all seeds."""

    throughput: float
    gap: float
    gap_max: int
    staleness: float

    @classmethod
    def of(cls, runs: Iterable[Figures]) -> Result:
        """Sums up one run per seed."""
        every = list(runs)
        return cls(
            statistics.fmean(run.gradients_per_second for run in every),
            statistics.fmean(run.gap_mean for run in every),
            max(run.gap_max for run in every),
            statistics.fmean(run.staleness_mean for run in every),
        )


Results = dict[str, Result]


def measure(scenario: Scenario, intervals: float, seeds: int) -> Results:
    """Runs every policy with the same seeds for `intervals` s; an undisturbed iteration takes 1 s."""

    def run(make: Callable[[], Policy], seed: int) -> Figures:
        return Figures.of(simulate(make(), scenario.workload(seed=seed, horizon=intervals), limit=Limit(intervals)))

    results = {name: Result.of(run(make, seed) for seed in range(seeds)) for name, make in POLICIES.items()}
    results[CLAIRVOYANT] = Result.of(
        clairvoyant(scenario.workload(seed=seed, horizon=intervals), UPPER, seconds=intervals) for seed in range(seeds)
    )
    return results


def table(name: str, results: Results) -> list[str]:
    """Returns a scenario's table in Markdown."""
    top = results[f"SSP({UPPER})"].throughput
    lines = [f"### {name}: {SCENARIOS[name].summary}", ""]
    lines += [f"| policy | throughput, % of SSP({UPPER}) | mean gap | largest gap | mean staleness |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for policy, r in results.items():
        share = f"{100 * r.throughput / top:.1f}"
        lines.append(f"| {policy} | {share} | {r.gap:.2f} | {r.gap_max} | {r.staleness:.2f} |")
    return [*lines, ""]


def summary(every: dict[str, Results]) -> list[str]:
    """Returns one table of all scenarios: throughput in % of SSP(UPPER), mean gap, largest gap."""
    shown = ["BSP", FIXED[0], FIXED[-1], "ASP", "paper", "paper-figure-2", "paper-capped", "moment", DYN, CLAIRVOYANT]
    lines = ["| policy | " + " | ".join(every) + " |", "| --- |" + " --- |" * len(every)]
    for policy in shown:
        cells = []
        for results in every.values():
            r, top = results[policy], results[f"SSP({UPPER})"].throughput
            cells.append(f"{100 * r.throughput / top:.1f} / {r.gap:.2f} / {r.gap_max}")
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def cheapest(results: Results) -> tuple[str, Result] | None:
    """Returns the SSP(s) of the least mean gap among those at least as fast as dyn; None if dyn is faster than all."""
    able = [name for name in FIXED if results[name].throughput >= results[DYN].throughput]
    best = min(able, key=lambda name: results[name].gap, default=None)
    return None if best is None else (best, results[best])


def verdict(name: str, results: Results) -> str:
    """Returns a scenario's row of the table of what must hold."""
    dyn, top = results[DYN], results[f"SSP({UPPER})"]
    share = 100 * dyn.throughput / top.throughput
    beaten = [
        fixed
        for fixed in FIXED
        if results[fixed].throughput > 1.02 * dyn.throughput and results[fixed].gap < 0.98 * dyn.gap
    ]
    rival = cheapest(results)
    third = "yes: faster than all"
    if rival:
        excess = 100 * (dyn.gap / rival[1].gap - 1)
        holds = "yes" if excess <= 0 else "NO"
        third = f"{holds}: {dyn.gap:.2f} against {rival[1].gap:.2f} of {rival[0]} ({excess:+.1f}%)"
    cells = [
        _holds(dyn.gap_max <= UPPER + 1, str(dyn.gap_max)),
        _holds(share >= 98, f"{share:.1f}%"),
        third,
        _holds(not beaten, ", ".join(beaten) or "none"),
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def _holds(holds: bool, text: str) -> str:
    return f"{'yes' if holds else 'NO'}: {text}"


def verdicts(every: dict[str, Results]) -> list[str]:
    """Returns the table of what must hold."""
    head = [f"largest gap <= {UPPER + 1}", f"throughput >= 98% of SSP({UPPER})"]
    head += ["mean gap <= that of any SSP(s) at least as fast", "SSP(s) better on both by more than 2%"]
    lines = ["| scenario | " + " | ".join(head) + " |", "| --- |" + " --- |" * len(head)]
    return [*lines, *(verdict(name, results) for name, results in every.items()), ""]


def main() -> None:
    """Prints the tables in Markdown and writes the picture beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--intervals", type=float, default=4000.0, help="length of a long run")
    parser.add_argument("--short", type=float, default=200.0, help="length of a short run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path(__file__).with_name("front.png"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    long = {name: measure(scenario, args.intervals, args.seeds) for name, scenario in SCENARIOS.items()}
    short = {name: measure(scenario, args.short, args.seeds) for name, scenario in SCENARIOS.items()}
    print(f"## What must hold of dyn, {args.intervals:.0f} iterations, {args.seeds} seeds\n")
    print("\n".join(verdicts(long)))
    print(f"## The same after {args.short:.0f} iterations\n")
    print("\n".join(verdicts(short)))
    print(f"## In short: throughput in % of SSP({UPPER}) / mean gap / largest gap\n")
    print("\n".join(summary(long)))
    print(f"## All policies, {args.intervals:.0f} iterations, {args.seeds} seeds\n")
    print("\n".join(line for name, results in long.items() for line in table(name, results)).rstrip())

    from picture import draw  # noqa: PLC0415  (lies beside this file; needs matplotlib)

    draw(long, args.picture)


if __name__ == "__main__":
    main()
