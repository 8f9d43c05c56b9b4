"""Checkpoints of several servers are those of one: a run goes on from them bit for bit, on any number of servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stalempi.errors import ConfigError
from stalempi.parcels import receive_value, send_value
from stalempi.pipeline.link import LocalLink
from stalempi.policy import BSP, DSSP, SSP, Policy
from stalempi.train.checkpoint import CheckpointStore
from tests.small import largest_difference
from tests.train.test_checkpoint import BATCH, Run, balance, stream

torch.set_num_threads(1)


@pytest.mark.parametrize("servers", [(2, 2, 2), (1, 3, 2), (3, 2, 1)], ids=str)
def test_a_bsp_run_stopped_twice_equals_an_unbroken_one_of_one_server(tmp_path: Path, servers: tuple[int, ...]) -> None:
    broken = Run(tmp_path / "broken", BSP)
    assert broken.go(total=480, cut=7, servers=servers[0]) is None
    assert broken.go(total=480, cut=13, servers=servers[1]) is None
    job = broken.go(total=480, servers=servers[2])
    whole = Run(tmp_path / "whole", BSP).go(total=480)
    assert job is not None
    assert whole is not None
    assert largest_difference(job.model, whole.model) == 0.0
    assert [w.bytes_pushed for w in job.stats.workers] == [w.bytes_pushed for w in whole.stats.workers]
    assert job.stats.updates == whole.stats.updates == 60
    balance(job, 480)
    ours, theirs = (
        CheckpointStore.load_part(CheckpointStore.find(tmp_path / run), "optimizer") for run in ("broken", "whole")
    )
    assert ours.keys() == theirs.keys()
    for place, state in theirs.items():
        assert all(torch.equal(ours[place][key], state[key]) for key in state)


def test_each_server_s_correction_goes_on(tmp_path: Path) -> None:
    """Under BSP it changes nothing, but what it has measured of the steps is in the last checkpoint."""

    def measured(name: str, *cuts: int | None) -> list[dict[str, Any]]:
        for cut in cuts:
            Run(tmp_path / name, BSP).go(total=240, cut=cut, servers=2, correction="gap-aware")
        saved = CheckpointStore.load_part(CheckpointStore.find(tmp_path / name), "server")["correction"]
        return [saved["state"], *saved["others"]]

    broken, whole = measured("broken", 7, None), measured("whole", None)
    assert [state["updates"] for state in broken] == [state["updates"] for state in whole] == [30, 30]
    for ours, theirs in zip(broken, whole, strict=True):
        for mine, other in zip(ours["mean_square"], theirs["mean_square"], strict=True):
            assert torch.equal(mine, other)
            assert mine.any()


@pytest.mark.parametrize("policy", [lambda: SSP(1), lambda: DSSP(0, 4)], ids=lambda make: str(make()))
def test_no_push_is_lost_or_repeated(tmp_path: Path, policy: Callable[[], Policy]) -> None:
    """Workers that waited when the checkpoint was taken wait again, for all servers."""
    run = Run(tmp_path, policy, workers=3)
    batches = [list(itertools.islice(stream(worker, 3), 200)) for worker in range(3)]
    counts = [0, 0, 0]
    for cut in (5, 5, None):
        job = run.go(total=600, cut=cut, servers=2)
        for worker, pushed in enumerate(run.pushed):
            assert pushed == batches[worker][counts[worker] : counts[worker] + len(pushed)]
        newest = CheckpointStore.find(tmp_path)
        counts = [w["iterations"] for w in CheckpointStore.load_part(newest, "server")["stats"]["workers"]]
    assert job is not None
    assert job.stats.samples == BATCH * sum(worker.applied for worker in job.stats.workers) >= 600
    assert all(worker.applied == worker.iterations for worker in job.stats.workers)


def test_another_number_of_workers_goes_on_too(tmp_path: Path) -> None:
    assert Run(tmp_path, BSP, workers=3).go(total=600, cut=3, servers=2) is None
    job = Run(tmp_path, BSP, workers=2).go(total=300, servers=2)
    assert job is not None
    balance(job, 300)
    assert len(job.stats.former) == 3


def test_values_with_tensors_come_over_a_link_as_they_were() -> None:
    link = LocalLink("rank 0")
    value: dict[int, dict[str, Any]] = {
        0: {"step": torch.tensor(3.0), "sum": torch.zeros(0, 2)},
        5: {"m": torch.arange(6.0).view(2, 3), "x": None},
    }
    for number in range(2):
        send_value(link, number, value)
    for number in range(2):
        back = receive_value(link, number)
        assert back.keys() == value.keys()
        assert back[5]["x"] is None
        for place, name in ((0, "step"), (0, "sum"), (5, "m")):
            assert torch.equal(back[place][name], value[place][name])
    with pytest.raises(ConfigError, match="nothing is pickled"):
        send_value(link, 2, object())
