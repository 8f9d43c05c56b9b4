"""Draws the comparison of policies (throughput, staleness, accuracy), and what an exchange takes by its size."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stalempi.errors import ConfigError
from stalempi.simulate.sweep import Row, pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "draw_exchange", "need_matplotlib"]


def need_matplotlib() -> None:
    """Raises ConfigError that says how to get matplotlib if it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('pictures need matplotlib: install it with pip install "stalempi[plot]", or leave --out out')


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes the picture to `path` (PNG): one panel, or two where something was learned."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (an extra)
    from matplotlib.figure import Figure  # noqa: PLC0415

    learned = [row for row in rows if row.outcomes[0].curve]
    figure = Figure(figsize=(13 if learned else 7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    colours = {row.label: f"C{place % 10}" for place, row in enumerate(rows)}
    left = figure.add_subplot(1, 2 if learned else 1, 1)
    throughput_against_staleness(left, rows, colours)
    if learned:
        _accuracy_against_time(figure.add_subplot(1, 2, 2), learned, colours)
    figure.savefig(path, dpi=130)


def throughput_against_staleness(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Draws a point per policy (a diamond where it is a bound), and the front of those that no other beats."""
    points = [(row.mean("staleness_mean"), row.mean("gradients_per_second")) for row in rows]
    policies = [point for row, point in zip(rows, points, strict=True) if not row.is_bound]
    front = [policies[place] for place in pareto_front(policies)]
    axes.step([x for x, _ in front], [y for _, y in front], where="post", color="0.7", zorder=1, label="Pareto front")
    for row, (x, y) in zip(rows, points, strict=True):
        axes.scatter([x], [y], color=colours[row.label], marker="D" if row.is_bound else "o", label=row.label)
    axes.set_xlabel("mean staleness (updates)")
    axes.set_ylabel("throughput (gradients/s)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _accuracy_against_time(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Draws the mean over seeds of each policy, and the range of its seeds, as far as its shortest run goes."""
    for row in rows:
        curves = [outcome.curve for outcome in row.outcomes]
        times = np.linspace(max(c[0].seconds for c in curves), min(c[-1].seconds for c in curves), 200)
        found = np.array([np.interp(times, [p.seconds for p in c], [p.accuracy for p in c]) for c in curves])
        axes.plot(times, found.mean(0), color=colours[row.label], linewidth=1.5, label=row.label)
        axes.fill_between(times, found.min(0), found.max(0), color=colours[row.label], alpha=0.1, linewidth=0)
    axes.set_xlabel("virtual time (s)")
    axes.set_ylabel("test accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_exchange(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes the picture of `stalempi-bench comm` to `path` (PNG): the time of each rival against the bytes."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (an extra)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(1, 1, 1)
    for name in dict.fromkeys(name for row in rows for name in row["timings"]):
        points = [(row["bytes"], 1e3 * row["timings"][name]["seconds"]) for row in rows if name in row["timings"]]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes pushed, and released", ylabel="time (ms)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
