"""Starts one Slurm for all tests that want one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

SCRIPTS = Path(__file__).parents[2] / "scripts"
_CANNOT = 3  # slurm-up's code where there can be no Slurm here


@pytest.fixture(scope="session")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields the configuration of a Slurm that runs as long as the tests do; skips where there can be none."""
    state = tmp_path_factory.mktemp("slurm")
    done = subprocess.run(
        [SCRIPTS / "slurm-up", state],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    try:
        if done.returncode == _CANNOT:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        yield state / "slurm.conf"
    finally:
        subprocess.run([SCRIPTS / "slurm-down", state], timeout=60, check=False)


@pytest.fixture
def cluster(slurm_conf: Path, tmp_path: Path) -> Cluster:
    """Returns that Slurm, with a folder of its own to submit from."""
    return Cluster(slurm_conf, tmp_path)
