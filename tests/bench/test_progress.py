"""Progress is a line every few seconds where nobody watches, and a bar of whole lines on a terminal."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator

import pytest

from stalempi.bench.progress import NARROW, Display, console
from stalempi.logs import log_to_stderr, logger
from stalempi.policy import Push
from stalempi.stats import RunStats
from stalempi.transport.inproc import InprocTransport
from tests.job import make_context

UP = "\x1b[1A\x1b[2K"


class Run:
    """A run whose clock and counts a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stats = RunStats([], started=100.0)

    def show(self, display: Display, *, seconds: float, samples: int) -> None:
        self.now += seconds
        self.stats.samples, self.stats.updates, self.stats.loss = samples, samples // 10, 0.5
        display(Push(0, self.now), [])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    found = Run()
    monkeypatch.setattr(time, "monotonic", lambda: found.now)
    monkeypatch.delenv("STALEMPI_TERMINAL", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    log_to_stderr(make_context(InprocTransport.group(2)[0]), None)
    yield found
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()


def display(run: Run) -> Display:
    return Display(1000, lambda: run.stats, lambda: 3, lambda: 0.025, 5.0)


def test_a_log_gets_a_line_every_five_seconds_and_one_at_the_end(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with display(run) as shown:
        for second in range(1, 13):
            run.show(shown, seconds=1.0, samples=50 * second)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[3] for line in lines] == ["250/1000", "500/1000", "600/1000"]
    assert lines[1] == "[server, rank 0] 500/1000 samples  loss 0.5000  lr 0.025  5 updates/s  gap 3"


def test_a_log_gets_no_control_characters(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with display(run) as shown:
        run.show(shown, seconds=9.0, samples=10)
    assert "\x1b" not in capsys.readouterr().err


def test_progress_goes_to_stderr_and_leaves_stdout_to_results(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with display(run):
        pass
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [50, NARROW - 1, 120])
def test_a_bar_is_one_whole_line_that_is_taken_back_before_the_next(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("STALEMPI_TERMINAL", str(width))
    with display(run) as shown:
        run.show(shown, seconds=1.0, samples=250)
        run.show(shown, seconds=0.05, samples=260)  # too soon to draw
        run.show(shown, seconds=1.0, samples=1004)
    drawn = capsys.readouterr().err
    assert drawn.endswith("\n")
    lines = drawn.splitlines()
    assert len(lines) == 3
    assert [line.startswith(UP) for line in lines] == [False, True, True]
    assert "gap 3" in lines[0]
    assert ("25%" if width < NARROW else "250/1000") in lines[0]
    assert ("100%" if width < NARROW else "1000/1000") in lines[1]


def test_a_line_of_the_log_is_not_taken_back_with_the_bar(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STALEMPI_TERMINAL", "120")
    with display(run) as shown:
        run.show(shown, seconds=1.0, samples=250)
        logger.warning("worker 1 is slow")
        run.show(shown, seconds=1.0, samples=500)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "[server, rank 0] worker 1 is slow"
    assert [line.startswith(UP) for line in lines] == [False, False, False, True]


@pytest.mark.parametrize("width", ["", "120"])
def test_above_info_nothing_is_shown(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    if width:
        monkeypatch.setenv("STALEMPI_TERMINAL", width)
    log_to_stderr(make_context(InprocTransport.group(2)[0]), "warning")
    with display(run) as shown:
        run.show(shown, seconds=9.0, samples=250)
    assert capsys.readouterr().err == ""


def test_a_worker_only_warns_unless_asked_for_more(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    worker = make_context(InprocTransport.group(4)[3])
    for level in (None, "debug"):
        log_to_stderr(worker, level)
        logger.debug("a step")
        logger.warning("a warning")
    marks = "[worker 2, rank 3] "
    assert capsys.readouterr().err.splitlines() == [marks + "a warning", marks + "a step", marks + "a warning"]


def test_a_bar_never_passes_its_end_or_wraps(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STALEMPI_TERMINAL", "50")
    monkeypatch.setenv("NO_COLOR", "1")
    with display(run) as shown:
        run.show(shown, seconds=1.0, samples=5000)
    plain = [line.removeprefix(UP) for line in capsys.readouterr().err.splitlines()]
    assert [len(line) for line in plain] == [50, 50]


def test_the_width_of_the_terminal_comes_from_whoever_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALEMPI_TERMINAL", "64")
    assert (console(io.StringIO()).width, console(io.StringIO()).is_terminal) == (64, True)
    monkeypatch.setenv("STALEMPI_TERMINAL", "3")
    assert console(io.StringIO()).width == 30
    monkeypatch.delenv("STALEMPI_TERMINAL")
    monkeypatch.setenv("COLUMNS", "70")
    assert (console(io.StringIO()).width, console(io.StringIO()).is_terminal) == (70, False)
