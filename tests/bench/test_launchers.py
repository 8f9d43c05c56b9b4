"""Each vendor's launcher is told the same wishes in its own flags."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from stalempi.bench import launchers
from stalempi.bench.launch import Launch, _without_launch, launch_command, launch_words
from stalempi.bench.launchers import Hosts, Vendor, find_vendor, read_hostfile, share_out
from stalempi.errors import ConfigError

SAYS = {
    "openmpi4": "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/",
    "openmpi5": "mpirun (Open MPI) 5.0.11",
    "prte": "prterun (PRTE) 3.0.8",
    "mpich4": "HYDRA build details:\n    Version:                                 4.0.2",
    "mpich5": "HYDRA build details:\n    Version:                                 5.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005 (id: 74c4a23)",
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Returns what makes a launcher of a vendor, on an ordinary user's machine that is in no allocation."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(launchers, "physical_cores", lambda: 4)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    for name in list(os.environ):
        if name.startswith(("STALEMPI_", "SLURM_", "PBS_", "LSB_", "OMP_", "MPI4PY_", "LD_", "VIRTUAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/venv/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", "/src")

    def make(vendor: str) -> Path:
        path = tmp_path / vendor
        path.write_text(f"#!/bin/sh\ncat <<E\n{SAYS[vendor]}\nE\n")
        path.chmod(0o755)
        return path

    return make


def words(launcher: Path, launch: Launch, ranks: int = 3) -> str:
    command = launch_command(launcher, ranks, ["py", "x.py"], launch)
    assert command[0] == str(launcher)
    return " ".join(command[1:])


@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        ("openmpi4", Vendor("openmpi", 4)),
        ("openmpi5", Vendor("openmpi", 5)),
        ("prte", Vendor("openmpi", 5)),
        ("mpich4", Vendor("mpich", 4)),
        ("mpich5", Vendor("mpich", 5)),
        ("intel", Vendor("intel", 2021)),
    ],
)
def test_a_launcher_is_known_by_what_it_says_of_its_version(
    made: Callable[[str], Path], vendor: str, expected: Vendor
) -> None:
    assert find_vendor(made(vendor)) == expected


OPENMPI = "--bind-to none -x PATH -x PYTHONPATH"
HYDRA = "-genv PATH /venv/bin:/usr/bin:/bin -genv PYTHONPATH /src"


@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        ("openmpi4", f"{OPENMPI} --host n1:2,n2:1 -n 3 py x.py"),
        ("openmpi5", f"{OPENMPI} --host n1:2,n2:1 -n 3 py x.py"),
        ("mpich5", f"{HYDRA} -hosts n1:2,n2:1 -n 3 py x.py"),
        ("intel", f"{HYDRA} -n 2 -host n1 py x.py : -n 1 -host n2 py x.py"),
    ],
)
def test_hosts_and_what_finds_our_python_there(made: Callable[[str], Path], vendor: str, expected: str) -> None:
    assert words(made(vendor), Launch(hosts="n1,n2")) == expected


@pytest.mark.parametrize(
    ("vendor", "line", "expected"),
    [
        ("openmpi5", "n1 slots=2", f"{OPENMPI} --hostfile"),
        ("mpich5", "n1:2", f"{HYDRA} -f"),
        ("intel", "n1:2", f"{HYDRA} -machinefile"),
    ],
)
def test_a_file_of_hosts(made: Callable[[str], Path], tmp_path: Path, vendor: str, line: str, expected: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"# ours\n\n{line}  # the first\nn2\n")
    assert words(made(vendor), Launch(hostfile=file)) == f"{expected} {file} -n 3 py x.py"


@pytest.mark.parametrize(
    ("vendor", "to", "expected"),
    [
        ("openmpi4", "socket", "--bind-to socket"),
        ("openmpi5", "socket", "--bind-to package"),
        ("openmpi5", "core", "--bind-to core"),
        ("mpich4", "socket", "-bind-to socket"),
        ("mpich5", "none", "-bind-to none"),
        ("intel", "none", "-genv I_MPI_PIN off"),
        ("intel", "numa", "-genv I_MPI_PIN_DOMAIN numa"),
    ],
)
def test_binding(made: Callable[[str], Path], vendor: str, to: str, expected: str) -> None:
    assert words(made(vendor), Launch(bind_to=to)) == f"{expected} -n 3 py x.py"


@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        ("openmpi5", "--bind-to none -x A=b c -x PYTHONPATH"),
        ("mpich5", "-genv A b c -genv PYTHONPATH /src"),
        ("intel", "-genv A b c -genv PYTHONPATH /src"),
    ],
)
def test_variables(made: Callable[[str], Path], vendor: str, expected: str) -> None:
    assert words(made(vendor), Launch(env=("A=b c", "PYTHONPATH"))) == f"{expected} -n 3 py x.py"


def test_more_flags_stand_after_ours_and_before_the_program(made: Callable[[str], Path]) -> None:
    launch = Launch(mpi_args="--mca btl 'self,tcp'")
    assert words(made("openmpi5"), launch) == "--bind-to none --mca btl self,tcp -n 3 py x.py"


def test_hosts_with_places_are_not_oversubscribed(made: Callable[[str], Path]) -> None:
    assert "--oversubscribe" in words(made("openmpi5"), Launch(), ranks=9)
    assert "--oversubscribe" not in words(made("openmpi5"), Launch(hosts="n1:9"), ranks=9)


def test_without_ssh_another_node_cannot_be_reached(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="no ssh on PATH, by which the launcher reaches n2"):
        words(made("openmpi5"), Launch(hosts=f"{socket.gethostname()}:1,n2:2"))
    here = Launch(hosts=f"localhost:1,{socket.gethostname()}:2")
    assert "-n 3" in words(made("openmpi5"), here)
    told = Launch(hosts="n2:3", mpi_args="--prtemca plm_ssh_agent /my/agent")
    assert "/my/agent" in words(made("openmpi5"), told)
    told = Launch(hosts="n2:3", mpi_args="-launcher-exec /my/agent")
    assert "/my/agent" in words(made("mpich5"), told)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert "-n 3" in words(made("openmpi5"), Launch(hosts="n2:3"))


@pytest.mark.parametrize(
    ("vendor", "line", "said"),
    [
        ("openmpi5", "n1:2", "line 2: Open MPI 5 reads lines like 'n1 slots=2', not 'n1:2'"),
        ("mpich4", "n1 slots=2", "line 2: MPICH 4 reads lines like 'n1:2', not 'n1 slots=2'"),
        ("openmpi4", "n1 slots=two", "line 2"),
        ("intel", "# nobody", "names no node"),
    ],
)
def test_a_file_that_the_launcher_would_not_understand(
    made: Callable[[str], Path], tmp_path: Path, vendor: str, line: str, said: str
) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        read_hostfile(file, find_vendor(made(vendor)))


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("a,b", 5, [("a", 3), ("b", 2)]),
        ("a:1,b,c", 6, [("a", 1), ("b", 3), ("c", 2)]),
        ("a:2,b:4", 6, [("a", 2), ("b", 4)]),
        ("a,b,c", 3, [("a", 1), ("b", 1), ("c", 1)]),
    ],
)
def test_ranks_are_shared_out_evenly_where_nothing_is_said(
    text: str, ranks: int, expected: list[tuple[str, int]]
) -> None:
    assert share_out(Hosts.parse(text), ranks) == expected


def test_ranks_get_the_words_without_those_of_their_launch() -> None:
    given = ["train", "-n", "3", "--hosts", "a", "--env=B=c", "--lr", "0.1", "--dry-run", "--env", "D", "--out", "x"]
    assert _without_launch(given) == ["train", "-n", "3", "--lr", "0.1", "--out", "x"]


def test_the_same_launch_in_words(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    launch = Launch(hostfile=file, bind_to="core", env=("A=b", "C=d"), mpi_args="--tag-output")
    assert launch_words(launch) == [
        *("--hostfile", str(file), "--bind-to", "core", "--mpi-args", "--tag-output", "--env=A=b", "--env=C=d")
    ]
