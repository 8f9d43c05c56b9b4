"""Compares DSSP's controllers with every fixed threshold in all named scenarios, and says what holds."""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from stalempi.policy import ASP, BSP, DSSP, SSP, Policy
from stalempi.policy.paper import PaperController
from stalempi.simulate.clairvoyant import clairvoyant
from stalempi.simulate.figures import Figures
from stalempi.simulate.scenarios import SCENARIOS, Scenario
from stalempi.simulate.sweep import pareto_front
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
    **{f"SSP({s})": partial(SSP, s) for s in range(LOWER, UPPER + 1)},
    "ASP": ASP,
    "paper": partial(DSSP, LOWER, UPPER, controller="paper"),
    "paper-figure-2": figure_2,
    "paper-capped": partial(DSSP, LOWER, UPPER, controller="paper-capped"),
    "moment": partial(DSSP, LOWER, UPPER, controller="moment"),
    DYN: partial(DSSP, LOWER, UPPER),
}


MARKERS = {"BSP": ("s", "C7"), "ASP": ("^", "C1"), "paper": ("P", "C6"), "paper-figure-2": ("h", "C8")}
MARKERS |= {"paper-capped": ("X", "C5"), "moment": ("v", "C4"), "dyn": ("*", "C3")}


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


def draw(every: dict[str, Results], path: Path) -> None:
    """Writes the picture (PNG) of all scenarios to `path`."""
    figure = Figure(figsize=(16, 8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 4)
    for axes, (name, results) in zip(grid.flat, every.items(), strict=True):
        _panel(axes, name, results)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle("up and left is better; the clairvoyant bound knows the future", fontsize=11)
    figure.savefig(path, dpi=100)


def _panel(axes: Axes, name: str, results: Results) -> None:
    top = results["SSP(15)"].throughput

    def point(policy: str) -> tuple[float, float]:
        return max(results[policy].gap, 0.1), 100 * results[policy].throughput / top

    fixed = [point(policy) for policy in results if policy.startswith("SSP")]
    axes.plot(*zip(*fixed, strict=True), "o-", color="C0", markersize=4, linewidth=1, label="SSP(3) .. SSP(15)")
    others = [point(policy) for policy in MARKERS]
    policies = fixed + others
    front = [policies[place] for place in pareto_front(policies)]
    axes.step(*zip(*front, strict=True), where="post", color="0.7", zorder=0, label="Pareto front")
    for (policy, (marker, colour)), (x, y) in zip(MARKERS.items(), others, strict=True):
        size = 150 if policy == "dyn" else 50
        axes.scatter([x], [y], marker=marker, color=colour, s=size, zorder=3, label=policy)
    x, y = point("clairvoyant(15)")
    axes.scatter([x], [y], marker="D", facecolors="none", edgecolors="k", s=50, zorder=3, label="clairvoyant(15)")
    axes.set(title=name, xscale="log", xlabel="mean gap, pushes", ylabel="throughput, % of SSP(15)")
    left, right = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if right > 100 * left else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


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
    draw(long, args.picture)


if __name__ == "__main__":
    main()
