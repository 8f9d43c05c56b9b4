"""Draws a panel per scenario: throughput against the mean gap, fixed thresholds as a line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from stalempi.simulate.sweep import pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

MARKERS = {"BSP": ("s", "C7"), "ASP": ("^", "C1"), "paper": ("P", "C6"), "paper-figure-2": ("h", "C8")}
MARKERS |= {"paper-capped": ("X", "C5"), "moment": ("v", "C4"), "dyn": ("*", "C3")}


class Result(Protocol):
    """What is drawn of a policy: gradients/s and mean gap."""

    @property
    def throughput(self) -> float:
        """Gradients per second."""

    @property
    def gap(self) -> float:
        """Mean gap."""


def draw(every: Mapping[str, Mapping[str, Result]], path: Path) -> None:
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


def _panel(axes: Axes, name: str, results: Mapping[str, Result]) -> None:
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
