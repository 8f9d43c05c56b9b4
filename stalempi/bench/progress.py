"""Shows on rank 0 how far a run has come: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stalempi.logs import logger
from stalempi.policy.base import Decision, Event
from stalempi.stats import RunStats

__all__ = ["NARROW", "Display", "console"]

_BAR_SECONDS = 0.1
_LINE_UP = "\x1b[1A\x1b[2K"
NARROW = 76  # characters: below this a screen gets the short form of everything


def console(stream: TextIO) -> Console:
    """Returns a console on `stream`.

    Under a launcher no stream is a terminal, or looks like one when it is not: the process that called the launcher
    says in STALEMPI_TERMINAL how wide its own is.
    """
    width = os.environ.get("STALEMPI_TERMINAL")
    if width is None:
        return Console(file=stream, force_terminal=False, width=int(os.environ.get("COLUMNS", "100")))
    return Console(file=stream, force_terminal=True, width=max(30, int(width)))


class Display:
    """Follows a run through the events of its server.

    Args:
        total: global samples of the whole run.
        stats: the server's counts, read at each event.
        gap: returns the largest gap among the workers at this moment.
        rate: returns the learning rate of the latest update.
        every: seconds between two lines of the log, where there is no terminal.
    """

    def __init__(
        self, total: int, stats: Callable[[], RunStats], gap: Callable[[], int], rate: Callable[[], float], every: float
    ) -> None:
        self._total, self._stats, self._gap, self._rate = total, stats, gap, rate
        self._console = console(sys.stderr)
        shown = self._console.is_terminal and logger.isEnabledFor(logging.INFO)
        self._bar = _make_bar(self._console) if shown else None
        self._every = _BAR_SECONDS if shown else every
        self._task = self._bar.add_task("", total=total, words="") if self._bar else None
        self._shown = time.monotonic()
        self._drawn = False
        self._log = _Interruption(self)

    def __enter__(self) -> Display:
        logger.addHandler(self._log)
        return self

    def __exit__(self, *error: object) -> None:
        logger.removeHandler(self._log)
        self._show()

    def leave_line(self) -> None:
        """Takes note that something else was written below the bar."""
        self._drawn = False

    def __call__(self, event: Event, decisions: list[Decision]) -> None:
        """Takes note of an event; draws when it is time."""
        del event, decisions
        now = time.monotonic()
        if now - self._shown >= self._every:
            self._shown = now
            self._show()

    def _show(self) -> None:
        stats = self._stats()
        seconds = max(time.monotonic() - stats.started, 1e-9)
        words = (
            f"loss {stats.loss:.4f}  lr {self._rate():.3g}  {stats.updates / seconds:.0f} updates/s  gap {self._gap()}"
        )
        if self._bar is None or self._task is None:
            logger.info("%d/%d samples  %s", stats.samples, self._total, words)
            return
        self._bar.update(self._task, completed=min(stats.samples, self._total), words=words)
        # Launchers pass on whole lines only, so the bar is a line of its own that is taken back before the next one.
        if self._drawn:
            self._console.file.write(_LINE_UP)
        self._drawn = True
        self._console.print(self._bar.get_renderable())


class _Interruption(logging.Handler):
    """Tells a display of each line of the log, which stands where its bar was."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        del record
        self._display.leave_line()


def _make_bar(console: Console) -> Progress:
    words = TextColumn("{task.fields[words]}")
    if console.width < NARROW:
        share = TextColumn("{task.percentage:.0f}%")
        return Progress(BarColumn(bar_width=None), share, words, console=console, auto_refresh=False, expand=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("samples"), words, TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=False)
