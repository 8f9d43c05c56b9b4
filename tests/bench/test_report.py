"""A run is written down whole or not at all, and its table fits a narrow terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from stalempi.bench.report import check_writable, environment, print_summary, write_results
from stalempi.errors import ConfigError
from stalempi.stats import RunStats, WorkerStats


def stats() -> RunStats:
    """Returns a long run of four workers: every figure as wide as it gets."""
    worker = WorkerStats(
        iterations=123456,
        samples=7_890_000,
        waited=400.0,
        started=10.0,
        ended=1010.0,
        gap_sum=1_518_508,
        gap_max=16,
        staleness_sum=3_000_000,
        staleness_max=48,
        applied=123456,
    )
    return RunStats([worker] * 4, updates=493_824, samples=31_560_000, started=10.0, ended=1010.0)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STALEMPI_TERMINAL", raising=False)
    monkeypatch.setenv("COLUMNS", "50")


@pytest.mark.usefixtures("narrow")
def test_the_table_fits_fifty_columns_with_every_figure_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(stats(), {"test accuracy": "0.9700"})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 50
    assert len(lines) == 1 + 4 + 1
    assert lines[1].split() == ["0", "123456", "7890", "40%", "12.30/16", "24.30"]
    assert lines[-1] == "test accuracy: 0.9700"


def test_a_wide_terminal_gets_the_headings_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STALEMPI_TERMINAL", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    print_summary(stats(), {})
    assert capsys.readouterr().out.splitlines()[0].split("  ")[0].strip() == "worker"


@pytest.mark.usefixtures("narrow")
def test_a_worker_that_did_nothing_has_a_row_of_zeros(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(RunStats([WorkerStats()]), {})
    assert capsys.readouterr().out.splitlines()[1].split() == ["0", "0", "0", "0%", "0.00/0", "0.00"]


def test_results_can_be_read_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    write_results(tmp_path, {"accuracy": 0.5, "options": {"out": None}}, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "result.json"]
    assert json.loads((tmp_path / "result.json").read_text()) == {"accuracy": 0.5, "options": {"out": None}}
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_the_model_file_is_as_small_as_the_model(tmp_path: Path) -> None:
    """A view of a large flat storage must not bring all of it along."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.data = torch.zeros(1_000_000).as_strided((4, 4), (4, 1))
    write_results(tmp_path, {}, model)
    assert (tmp_path / "model.pt").stat().st_size < 10_000


@pytest.mark.parametrize("result", [{"accuracy": object()}, {"accuracy": 0.5}], ids=["result", "model"])
def test_a_failure_in_mid_write_leaves_the_earlier_files_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Mapping[str, object]
) -> None:
    model = nn.Linear(2, 2)
    write_results(tmp_path, {"accuracy": 0.25}, model)
    before = (tmp_path / "model.pt").read_bytes()

    def half(state: object, file: Path) -> None:
        file.write_bytes(b"half a model")
        raise OSError("no space left on device")

    if isinstance(result["accuracy"], float):
        monkeypatch.setattr(torch, "save", half)
    with pytest.raises((TypeError, OSError)):
        write_results(tmp_path, result, model)
    assert json.loads((tmp_path / "result.json").read_text()) == {"accuracy": 0.25}
    assert (tmp_path / "model.pt").read_bytes() == before


def test_a_first_write_that_fails_leaves_no_result(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_results(tmp_path, {"accuracy": object()}, nn.Linear(2, 2))
    assert not (tmp_path / "result.json").exists()


def test_the_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*file/out cannot be written .*: choose another folder"):
        check_writable(tmp_path / "file" / "out")


def test_the_environment_names_what_a_result_depends_on() -> None:
    found = environment("Open MPI 5.0")
    assert found["mpi"] == "Open MPI 5.0"
    assert found["torch"] == torch.__version__
    assert int(found["cores"]) >= 1
