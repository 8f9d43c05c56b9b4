"""Groups, the evaluator and the collectives in real jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stalempi.train.models import build_model
from tests.launch import MPICH, mpirun

pytestmark = pytest.mark.mpi
PROGRAMS = Path(__file__).with_name("programs")
TCP = ("--mca", "btl", "self,tcp")


@pytest.mark.parametrize(("group", "flags"), [(2, TCP), (4, ())], ids=["two of two, tcp", "one of four"])
def test_groups_under_bsp_equal_one_process(group: int, flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAMS / "groups.py", 5, str(group), flags=flags, timeout=120)
    assert done.code == 0, done.err
    *equal, uneven = done.out.splitlines()
    assert uneven == "uneven: no batch lost"
    lines = [line.split() for line in equal]
    assert [line[0] for line in lines] == ["momentum", "adam"]
    for _, difference, updates, samples, workers in lines:
        assert float(difference) < 1e-5
        assert (int(updates), int(samples), int(workers)) == (20, 260, 4 // group)


@pytest.mark.skipif(MPICH is None, reason="no MPICH here: scripts/test puts one in .mpich")
def test_groups_and_collectives_work_under_mpich() -> None:
    assert mpirun(PROGRAMS / "groups.py", 5, "2", mpich=True).code == 0
    assert mpirun(PROGRAMS / "collectives.py", 5, "all", mpich=True).out.count("got it all") == 3


@pytest.mark.parametrize("flags", [(), TCP], ids=["shared memory", "tcp"])
def test_every_collective_brings_what_it_should(flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAMS / "collectives.py", 5, "all", flags=flags, timeout=120)
    assert done.code == 0, done.err
    assert done.out.count("got it all") == 3


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("ended", "rank(s) 3 did not join within 2 s"),
        ("other", "rank 3 has 'barrier' where rank 1 has 'allreduce mean of a number (float) named loss'"),
        ("server", "barrier is among the ranks that compute, but this is the server"),
    ],
)
def test_a_rank_that_does_not_take_part_is_named(way: str, said: str) -> None:
    done = mpirun(PROGRAMS / "collectives.py", 4, way, env={"STALEMPI_STALL_TIMEOUT": "2"}, timeout=90)
    assert done.code not in (None, 0), done.out
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_member_of_a_group_that_falls_silent_is_named_by_its_leader() -> None:
    done = mpirun(PROGRAMS / "fails.py", 3, "silent", "2", "2", env={"STALEMPI_STALL_TIMEOUT": "3"}, timeout=90)
    assert done.code not in (None, 0)
    assert "rank(s) 2 did not push to rank 1" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("rank", [1, 2], ids=["leader", "member"])
def test_a_rank_of_a_group_that_raises_ends_the_job_at_once(rank: int) -> None:
    done = mpirun(PROGRAMS / "fails.py", 3, "raise", str(rank), "2", timeout=90)
    assert done.code not in (None, 0)
    assert done.err.count("ValueError: boom") == 1
    assert f"rank {rank} (worker 0, member {rank - 1}) step 4" in done.err


def test_the_command_trains_in_groups_with_an_evaluator(tmp_path: Path) -> None:
    words = "-m stalempi.bench train --group 2 --evaluator --evaluate-every 2000 --epochs 5 --policy bsp --model mlp"
    done = mpirun([*words.split(), "--out", str(tmp_path)], 4, timeout=120)
    assert done.code == 0, done.err
    assert "1 worker(s) of 2 ranks, an evaluator" in done.err
    result = json.loads((tmp_path / "result.json").read_text())
    curve = result["curve"]
    assert all(set(point) == {"seconds", "samples", "accuracy", "loss"} for point in curve)
    assert [point["samples"] for point in curve] == sorted(point["samples"] for point in curve)
    assert (curve[-1]["samples"], curve[-1]["accuracy"]) == (result["samples"], result["accuracy"])
    assert result["samples"] == 5 * 1437
    assert result["snapshots_skipped"] + len(curve) == 4
    model = build_model("mlp", num_classes=10, input_shape=(1, 8, 8))
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
