"""Lays the comparison of policies out as a table: on the screen, or in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.table import Table

from stalempi.simulate.sweep import Interval, Row

__all__ = ["markdown", "screen_tables"]

Cell = Callable[[Row], str]

_TIMING: dict[str, Cell] = {
    "grad/s": lambda row: f"{row.mean('gradients_per_second'):.2f}",
    "upd/s": lambda row: f"{row.mean('updates_per_second'):.2f}",
    "wait": lambda row: f"{100 * row.mean('wait_share'):.1f}%",
    "gap mean/max": lambda row: f"{row.mean('gap_mean'):.2f}/{row.largest_gap()}",
    "stale": lambda row: f"{row.mean('staleness_mean'):.2f}",
}
_WIDE = 110


def _learning(target: float) -> dict[str, Cell]:
    return {
        f"s to {target:g}": lambda row: _interval(row, row.until(target, "seconds"), ".1f"),
        f"samples to {target:g}": lambda row: _interval(row, row.until(target, "samples"), ".0f"),
        "accuracy": lambda row: _interval(row, row.final_accuracy(), ".4f"),
    }


def _interval(row: Row, interval: Interval | None, form: str) -> str:
    """Returns "mean +-half", and how many seeds got there if not all did."""
    if interval is None:
        return "never" if row.outcomes[0].curve else "-"
    text = f"{interval.mean:{form}}"
    if not math.isnan(interval.half):
        text += f" +-{interval.half:{form}}"
    seeds = len(row.outcomes)
    return text if interval.count == seeds else f"{text} ({interval.count}/{seeds})"


def screen_tables(rows: Sequence[Row], target: float | None, *, width: int) -> list[Table]:
    """Returns one table, or two where the terminal of `width` columns is too narrow; `target` None: nothing learned."""
    learning = {} if target is None else _learning(target)
    groups = [_TIMING | learning] if width >= _WIDE or not learning else [_TIMING, learning]
    return [_table(rows, columns) for columns in groups]


def _table(rows: Sequence[Row], columns: dict[str, Cell]) -> Table:
    table = Table("policy", *columns, box=None, pad_edge=False, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.label, *(cell(row) for cell in columns.values()))
    return table


def markdown(rows: Sequence[Row], target: float | None) -> str:
    """Returns the one table in Markdown; +- is half a 95% confidence interval over seeds."""
    columns = _TIMING | ({} if target is None else _learning(target))
    lines = ["| policy | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for row in rows:
        lines.append(f"| `{row.label}` | " + " | ".join(cell(row) for cell in columns.values()) + " |")
    return "\n".join(lines) + "\n"
