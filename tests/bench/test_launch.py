"""stalempi-bench finds the launcher that is there and gives it the flags that it needs here, and no others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stalempi.bench import launch, launchers
from stalempi.bench.launch import find_launcher, is_launched, launch_command, relaunch
from stalempi.errors import ConfigError

OPENMPI = "mpirun (Open MPI) 5.0.6"
PRTE = "prterun (PRTE) 3.0.8"
ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
HYDRA = "HYDRA build details: Version: 4.2.3"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder that is all there is on PATH, for a Python that has no launcher beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", str(folder))
    for name in [name for name in os.environ if name.startswith("STALEMPI_") or name in ALLOCATIONS]:
        monkeypatch.delenv(name)
    return folder


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this an ordinary user's machine of 4 cores."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(launchers, "physical_cores", lambda: 4)


def put(path: Path, says: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "{says}"\n')
    path.chmod(0o755)
    return path


def flags(launcher: Path, ranks: int = 3) -> list[str]:
    """Returns what stands before the number of ranks and the program."""
    command = launch_command(launcher, ranks, ["python", "x.py"])
    assert command[0] == str(launcher)
    assert command[-4:] == ["-n", str(ranks), "python", "x.py"]
    return command[1:-4]


def test_the_launcher_beside_python_comes_before_the_first_on_path(bare: Path) -> None:
    on_path = put(bare / "mpirun", OPENMPI)
    assert find_launcher() == on_path
    beside = put(Path(sys.executable).with_name("mpiexec"), HYDRA)
    assert find_launcher() == beside


def test_mpiexec_does_where_there_is_no_mpirun(bare: Path) -> None:
    launcher = put(bare / "mpiexec", HYDRA)
    assert find_launcher() == launcher


def test_stalempi_mpiexec_comes_before_all(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bare / "mpirun", OPENMPI)
    mine = put(tmp_path / "mine", OPENMPI)
    monkeypatch.setenv("STALEMPI_MPIEXEC", str(mine))
    assert find_launcher() == mine


def test_a_named_launcher_that_is_no_program_is_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bare / "mpirun", OPENMPI)
    monkeypatch.setenv("STALEMPI_MPIEXEC", "/nowhere/mpirun")
    with pytest.raises(ConfigError, match="STALEMPI_MPIEXEC=/nowhere/mpirun is not a program"):
        find_launcher()


@pytest.mark.usefixtures("bare")
def test_where_there_is_no_launcher_the_way_out_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no mpirun or mpiexec found: .*pip install 'stalempi\[mpi\]'"):
        find_launcher()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("says", [OPENMPI, PRTE])
def test_open_mpi_binds_no_rank_to_one_core(bare: Path, says: str) -> None:
    assert flags(put(bare / "mpirun", says)) == ["--bind-to", "none"]


@pytest.mark.usefixtures("plain")
def test_open_mpi_is_told_that_root_is_meant(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert flags(put(bare / "mpirun", OPENMPI)) == ["--bind-to", "none", "--allow-run-as-root"]


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("ranks", "needed"), [(4, False), (5, True)])
def test_open_mpi_oversubscribes_only_with_more_ranks_than_cores(bare: Path, ranks: int, needed: bool) -> None:
    assert ("--oversubscribe" in flags(put(bare / "mpirun", OPENMPI), ranks)) == needed


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_inside_an_allocation_the_batch_system_decides(
    bare: Path, monkeypatch: pytest.MonkeyPatch, allocation: str
) -> None:
    monkeypatch.setenv(allocation, "17")
    monkeypatch.setattr(launch, "_FORWARDED", ("PATH",))
    assert flags(put(bare / "mpirun", OPENMPI), 100) == ["--bind-to", "none", "-x", "PATH"]


def test_hydra_needs_no_flag_even_for_root_and_many_ranks(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(launchers, "physical_cores", lambda: 1)
    assert flags(put(bare / "mpiexec", HYDRA), 9) == []


def test_a_launcher_that_cannot_run_is_the_users_fault(tmp_path: Path) -> None:
    broken = tmp_path / "mpirun"
    broken.write_text("#!/nowhere/sh\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="is it an MPI launcher"):
        launch_command(broken, 3, ["python"])


@pytest.mark.parametrize(
    "mark", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS", "STALEMPI_LAUNCHED"]
)
def test_every_launcher_leaves_its_mark(mark: str) -> None:
    assert is_launched({"HOME": "/", mark: "1"})


def test_an_allocation_alone_is_no_launch() -> None:
    assert not is_launched({"HOME": "/", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"})


@pytest.mark.usefixtures("plain")
def test_a_relaunch_replaces_the_process_and_marks_the_ranks(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    launcher = put(bare / "mpirun", OPENMPI)
    relaunch(3, ["train", "-n", "3"])
    ((path, command, environment),) = calls
    assert path == launcher
    assert command == [
        str(launcher),
        *"--bind-to none -n 3".split(),
        sys.executable,
        "-m",
        "stalempi.bench",
        *"train -n 3".split(),
    ]
    assert is_launched(environment)
    assert environment["PATH"] == str(bare)


def test_cores_are_counted_without_hardware_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_threads_each = [f"processor\t: {n}\nphysical id\t: 0\ncore id\t: {n // 2}\n" for n in range(8)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "\n".join(two_threads_each))
    assert launchers.physical_cores() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert launchers.physical_cores() == 2
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor\t: 0\n")  # as on ARM
    assert launchers.physical_cores() == 2
