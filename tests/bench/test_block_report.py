"""What a block writes down while it runs is in the files at once, and short runs leave figures too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stalempi.bench.block_report import BlockProgress, BlockTrace
from stalempi.errors import ConfigError
from stalempi.pipeline.actions import Action, Op
from stalempi.pipeline.dryrun import Done


class Rows:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.closed = False

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


def progress(rows: Rows, every: float) -> BlockProgress:
    return BlockProgress(every, 8, 80, [rows], seconds=lambda: 3.0, rate=lambda: 0.25)


def test_an_action_is_in_the_file_as_soon_as_it_is_done(tmp_path: Path) -> None:
    file = tmp_path / "trace.0"
    with BlockTrace(file) as trace:
        trace(Done(1, Action(Op.FORWARD, 4), 10.0, 10.5))
        trace(Done(1, Action(Op.BACKWARD, 3, 2), 10.75, 12.0))
        rows = [json.loads(line) for line in file.read_text().splitlines()]  # not closed yet
    assert rows == [
        {"block": 1, "action": "F4", "begin": 0.0, "end": 0.5},
        {"block": 1, "action": "B3.2", "begin": 0.75, "end": 2.0},
    ]


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace .*/none/trace.0 cannot be written"):
        BlockTrace(tmp_path / "none" / "trace.0")


def test_a_run_shorter_than_the_interval_writes_a_row_at_its_end() -> None:
    rows = Rows()
    with progress(rows, 1e9) as shown:
        for batch, loss in enumerate([None, 2.0, 3.0], start=1):
            shown.add(8 * batch, loss)
        assert rows.rows == []
    (row,) = rows.rows
    assert row.pop("samples_per_second") > 0
    assert row == {"seconds": 3.0, "samples": 24, "lr": 0.25, "loss": 2.5}
    assert rows.closed


def test_rows_are_means_since_the_row_before_and_the_last_is_written_if_the_run_fails() -> None:
    rows = Rows()

    def fail() -> None:
        with progress(rows, 1e-9) as shown:
            shown.add(8, 2.0)
            shown.add(16, 3.0)
            shown.add(24, None)  # no loss, no line
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [(row["samples"], row["loss"]) for row in rows.rows] == [(8, 2.0), (16, 3.0), (24, None)]


def test_a_run_that_did_nothing_writes_nothing() -> None:
    rows = Rows()
    with progress(rows, 1.0):
        pass
    assert rows.rows == []
    assert rows.closed
