"""The launchers that are here understand what we tell them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stalempi.bench.launch import Launch, find_launcher, launch_command
from tests.launch import MPICH, Running

pytestmark = pytest.mark.mpi

PROGRAM = """
import os, sys
from mpi4py import MPI
sys.stdout.write(f"{MPI.COMM_WORLD.Get_size()} {os.environ['MARK']} {len(os.sched_getaffinity(0))}\\n")
"""


@pytest.mark.parametrize(
    "mpich", [False, pytest.param(True, marks=pytest.mark.skipif(not MPICH, reason="no MPICH beside"))]
)
@pytest.mark.parametrize("file", [False, True], ids=["hosts", "hostfile"])
def test_hosts_binding_and_variables_reach_the_ranks(mpich: bool, file: bool, tmp_path: Path) -> None:
    launcher = Path(MPICH or "", "bin/mpiexec") if mpich else find_launcher()
    more = "-prepend-rank" if mpich else "--tag-output"
    where = tmp_path / "hosts"
    where.write_text("localhost:2\n" if mpich else "localhost slots=2\n")
    launch = Launch(
        hosts=None if file else "localhost",
        hostfile=where if file else None,
        bind_to="core",
        env=("MARK=a=b",),
        mpi_args=more,
    )
    command = launch_command(launcher, 2, [sys.executable, "-c", PROGRAM], launch)
    environment = dict(os.environ)
    if mpich:
        environment["MPI4PY_LIBMPI"] = str(Path(MPICH or "", "lib/libmpi.so.12"))
    done = Running(command, environment).finish(60)
    assert done.code == 0, done.err
    said = done.out.splitlines()
    assert sum("2 a=b 1" in line for line in said) == 2
    assert not any(line.startswith("2") for line in said)  # --mpi-args: each line says whose it is


def test_the_command_line_of_a_dry_run_trains(tmp_path: Path) -> None:
    words = "train -n 2 --policy asp --samples 64 --launcher".split()
    command = [sys.executable, "-m", "stalempi.bench", *words, str(find_launcher()), "--out", str(tmp_path)]
    dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, timeout=60, check=True)
    assert not (tmp_path / "result.json").exists()
    assert "--dry-run" not in dry.stdout
    done = Running(shlex.split(dry.stdout), os.environ).finish(60)
    assert done.code == 0, done.err
    assert (tmp_path / "result.json").exists()


def test_compare_prints_the_command_line_of_every_real_run() -> None:
    words = "compare --real --learn digits --policies bsp,ssp:3 --seeds 1 --hosts localhost --dry-run".split()
    done = subprocess.run(
        [sys.executable, "-m", "stalempi.bench", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("localhost:5" in line for line in lines)
