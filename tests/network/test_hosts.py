"""Jobs that cross a network: several hosts with addresses of their own, one behind a slow or lossy link."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stalempi.bench.launch import Launch, find_launcher, launch_words
from stalempi.bench.launchers import find_vendor
from stalempi.errors import ConfigError
from tests.launch import MPICH
from tests.network.hosts import Cable, Hosts, missing
from tests.network.jobs import Setting, launch_over, run_on, train_over


def why_not() -> str | None:
    try:
        other = find_vendor(find_launcher()).name != "openmpi"
    except ConfigError as error:
        return str(error)
    return "the launcher is not Open MPI's" if other else missing()


pytestmark = [
    pytest.mark.mpi,
    pytest.mark.alone,
    pytest.mark.skipif(why_not() is not None, reason=f"no hosts: {why_not()}"),
]
SETTING = Setting(workers=2, pushes=50)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Yields three hosts, the last behind a link of 20 ms and 100 Mbit/s."""
    with SETTING.hosts() as made:
        yield made


@pytest.mark.parametrize(
    "mpich", [False, pytest.param(True, marks=pytest.mark.skipif(not MPICH, reason="no MPICH beside"))]
)
def test_doctor_finds_the_slow_link(hosts: Hosts, mpich: bool) -> None:
    launch, env = launch_over(hosts), []
    if mpich:
        env = [f"MPI4PY_LIBMPI={MPICH}/lib/libmpi.so.12", "UCX_TLS=tcp,self"]  # or UCX sees that it is one machine
        agent = f"-launcher ssh -launcher-exec {hosts.agent()}"
        launch = Launch(hosts=launch.hosts, mpi_args=agent, launcher=Path(MPICH or "", "bin/mpiexec"))
    command = ["env", *env, sys.executable, "-m", "stalempi.bench", "doctor", "-n", "3", *launch_words(launch)]
    done = run_on(hosts, command, 100)
    assert "n0: 1, n1: 1, n2: 1" in done.stdout, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "round trips between nodes" in line)
    assert line.startswith("warn")
    assert "slowest 0-2" in line or "slowest 1-2" in line
    assert done.returncode == 1


def test_dssp_trains_with_one_worker_behind_a_slow_link_as_fast_as_predicted(hosts: Hosts, tmp_path: Path) -> None:
    """Within 15%; a busy machine may have two tries more."""
    expected = SETTING.predict("dssp:3:15")
    assert expected.seconds > 1.1 * Setting(workers=2, pushes=50, cable=Cable()).predict("dssp:3:15").seconds
    off = math.inf
    for _ in range(3):
        found = SETTING.measure("dssp:3:15", hosts, tmp_path)
        assert found.gap_max <= 16
        off = abs(found.gradients_per_second / expected.gradients_per_second - 1)
        if off < 0.15:
            break
    assert off < 0.15


def test_frames_that_are_lost_cost_time_and_no_gradient(tmp_path: Path) -> None:
    words = "--policy asp --model mlp --dataset synthetic --batch-size 4 --samples 240".split()
    with Hosts([Cable(), Cable(delay=0.002, loss=0.02)]) as lossy:
        result = train_over(lossy, tmp_path, words)
    (worker,) = result["workers"]
    assert worker["iterations"] == 60
    assert (worker["samples"], result["samples"], result["updates"]) == (240, 240, 60)


def test_dsp_hides_a_slow_link_between_two_blocks_where_backpropagation_waits_for_it(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Blocks of F = R = 20, B = 40 ms: one at a time and twice over the link, 220 ms a batch; with queues, 60."""
    words = "--model mlp --dataset synthetic --batch-size 16 --samples 640 --emulate-ms 20,20,40".split()
    seconds = {}
    for method in ("bp", "dsp --p 2,2,0 --m 8,4,0"):
        name, *lengths = method.split()
        found = train_over(hosts, tmp_path / name, ["--method", name, *lengths, *words], command="pipeline")
        assert [one["steps"] for one in found["blocks"]] == [40, 40, 40]
        steady = [max(one["staleness"], key=one["staleness"].get) for one in found["blocks"]]
        assert steady == ["0", "0", "0"] if name == "bp" else ["8", "4", "0"]
        seconds[name] = found["seconds"]
    assert seconds["bp"] > 1.5 * seconds["dsp"]
