"""Training with N workers is the same as training in one process, where mathematics says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import mpirun

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("programs") / "equal.py"


def differences(workers: int, *policies: str) -> list[float]:
    """Runs the program and returns the largest difference in any parameter, for momentum and Adam, by policy."""
    done = mpirun(PROGRAM, workers + 1, *policies)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == 2 * len(policies)
    return [float(line.split()[-1]) for line in lines]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_bsp_on_shards_equals_one_process_on_the_joined_batch(workers: int) -> None:
    assert max(differences(workers, "bsp")) < 1e-5


def test_one_worker_equals_plain_training_bit_for_bit_under_every_policy() -> None:
    assert differences(1, "asp", "ssp", "bsp") == [0.0] * 6


def test_accumulated_clipped_scaled_and_scheduled_gradients_equal_those_of_one_process() -> None:
    """Two workers under BSP; the model is channels_last, compiled by tracing, and its biases and norms do not decay."""
    done = mpirun(PROGRAM.with_name("gradients.py"), 3, timeout=150)
    assert done.code == 0, done.err
    moved, difference, updates, *skipped = map(float, done.out.split())
    assert (updates, skipped) == (11, [1, 1])
    assert moved > 0.05
    assert difference < 1e-5
    assert sorted(line for line in done.err.splitlines() if line.startswith("[")) == [
        "[worker 0, rank 1] has left",
        "[worker 1, rank 2] has left",
    ]
