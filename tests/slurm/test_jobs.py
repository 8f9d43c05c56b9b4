"""The templates are submitted to a real Slurm and train to their end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, Record, script

pytestmark = [pytest.mark.mpi, pytest.mark.alone]

LIMIT = 240.0  # seconds; a quiet machine needs a tenth
TWO_NODES = ("--nodes", "2", "--ranks-per-node", "1")
LAUNCHERS = pytest.mark.parametrize("launcher", ["mpirun", "srun"])


def read(path: Path) -> str:
    """Returns what a rank has written so far."""
    return path.read_text() if path.exists() else ""


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def check_books(found: dict[str, Any], samples: int) -> None:
    """Every push was applied once, and no sample was lost or counted twice beyond the last batches."""
    assert found["updates"] == sum(worker["iterations"] for worker in found["workers"])
    assert found["samples"] == sum(worker["samples"] for worker in found["workers"])
    assert samples <= found["samples"] < samples + 32 * len(found["workers"])


def check_ended_well(cluster: Cluster, records: list[Record]) -> None:
    states = {(one["JobState"], one["ExitCode"]) for one in records}
    assert states == {("COMPLETED", "0:0")}, f"{records}\n{cluster.log()}"


@LAUNCHERS
def test_a_data_parallel_job_trains_over_two_nodes(cluster: Cluster, launcher: str) -> None:
    words = [*TWO_NODES, "--launcher", launcher, "--", "--policy", "dssp", "--epochs", "2"]
    job = cluster.submit(script(cluster.folder, "dssp", *words))
    [record] = cluster.wait(job, LIMIT)
    check_ended_well(cluster, [record])
    assert record["NumNodes"] == "2"
    out = cluster.folder / "runs" / job
    check_books(result(out), 2 * 1437)
    assert "test accuracy" in read(out / "rank-0.out")
    assert {path.name for path in out.glob("rank-*")} == {f"rank-{r}.{end}" for r in range(3) for end in ("out", "err")}


@LAUNCHERS
def test_a_job_that_is_warned_saves_its_state_is_queued_again_and_goes_on(cluster: Cluster, launcher: str) -> None:
    words = [*TWO_NODES, "--launcher", launcher, "--", "--policy", "dssp", "--epochs", "2", "--emulate-ms", "8"]
    job = cluster.submit(script(cluster.folder, "dssp", *words))
    out = cluster.folder / "runs" / job
    cluster.wait_for(job, lambda _: "samples" in read(out / "rank-0.err"), LIMIT)  # its progress
    cluster.warn(job)
    cluster.wait_for(job, lambda one: one["Restarts"] == "1", LIMIT)
    assert "test accuracy" not in read(out / "rank-0.out")
    [record] = cluster.wait(job, LIMIT)
    check_ended_well(cluster, [record])
    assert record["Restarts"] == "1"
    assert re.search(r"resumed from .* at [1-9]\d* samples", read(out / "rank-0.err"))
    check_books(result(out), 2 * 1437)


def test_a_job_that_fails_says_why_in_its_own_log_and_is_not_queued_again(cluster: Cluster) -> None:
    words = [*TWO_NODES, "--", "--batch-size", "2000"]
    job = cluster.submit(script(cluster.folder, "dssp", *words))
    [record] = cluster.wait(job, LIMIT)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "2:0", "0")
    assert "larger than a shard" in (cluster.folder / f"stalempi-dssp-{job}.out").read_text()


@LAUNCHERS
def test_a_heterogeneous_job_has_its_server_in_one_partition_and_workers_in_two(
    cluster: Cluster, launcher: str
) -> None:
    parts = ["--server-partition", "servers", "--partition", "one", "--partition", "two"]
    words = ["--nodes", "1", "--ranks-per-node", "1", *parts, "--launcher", launcher, "--", "--epochs", "2"]
    job = cluster.submit(script(cluster.folder, "hetjob", *words))
    records = cluster.wait(job, LIMIT)
    check_ended_well(cluster, records)
    assert {(one["Partition"], one["NodeList"]) for one in records} == {("servers", "n0"), ("one", "n1"), ("two", "n2")}
    found = result(cluster.folder / "runs" / job)
    assert len(found["workers"]) == 2
    check_books(found, 2 * 1437)


def test_a_sweep_is_an_array_and_a_job_that_sums_it_up(cluster: Cluster) -> None:
    """One of its runs is warned before it can have a state to save: it begins again, and the other one goes on."""
    path = script(cluster.folder, "sweep", "--nodes", "1", "--ranks-per-node", "1", "--", "--epochs", "2")
    text = path.read_text().replace('"ssp --bound 3" ', "").replace("SEEDS=2", "SEEDS=1")
    path.write_text(text.replace("--array=0-5", "--array=0-1"))
    array = cluster.submit(path)
    total = cluster.submit(f"--dependency=afterany:{array}", script(cluster.folder, "summary"), f"runs/{array}")
    cluster.wait_for(f"{array}_0", lambda _: (cluster.folder / "runs" / array / "0" / "rank-0.err").exists(), LIMIT)
    cluster.warn(f"{array}_0")
    records = cluster.wait(array, LIMIT)
    check_ended_well(cluster, records)
    assert {one["ArrayTaskId"]: one["Restarts"] for one in records} == {"0": "1", "1": "0"}
    check_ended_well(cluster, cluster.wait(total, LIMIT))
    for task, policy in enumerate(["bsp", "dssp"]):
        found = result(cluster.folder / "runs" / array / str(task))
        assert found["options"]["policy"].startswith(policy)
        check_books(found, 2 * 1437)
    table = (cluster.folder / f"stalempi-summary-{total}.out").read_text()
    assert "bsp" in table
    assert "dssp(" in table
    assert "accuracy" in table


def check_blocks(found: dict[str, Any], blocks: int, replicas: int) -> None:
    """Every block of every copy has seen every batch, once."""
    batches = 2 * (1437 // (32 * replicas))
    assert [(one["replica"], one["block"]) for one in found["blocks"]] == [
        (replica, block) for replica in range(replicas) for block in range(blocks)
    ]
    assert {(one["steps"], one["updates"]) for one in found["blocks"]} == {(batches, batches)}
    assert found["samples"] == batches * 32 * replicas


@LAUNCHERS
def test_a_pipeline_over_two_nodes_that_is_warned_goes_on_from_its_checkpoint(cluster: Cluster, launcher: str) -> None:
    words = ["--epochs", "2", "--model", "cnn", "--emulate-ms", "40,40,80", "--log-interval", "1"]
    path = script(cluster.folder, "dsp", *TWO_NODES, "--launcher", launcher, "--", "--method", "dsp", *words)
    job = cluster.submit(path)
    out = cluster.folder / "runs" / job
    cluster.wait_for(job, lambda _: "samples/s" in read(out / "rank-1.err"), LIMIT)  # its progress
    cluster.warn(job)
    cluster.wait_for(job, lambda one: one["Restarts"] == "1", LIMIT)
    [record] = cluster.wait(job, LIMIT)
    check_ended_well(cluster, [record])
    assert "going on from" in read(out / "rank-0.err")
    check_blocks(result(out), blocks=2, replicas=1)


def test_a_hybrid_job_has_a_copy_of_the_pipeline_on_each_node(cluster: Cluster) -> None:
    words = ["--method", "dsp", "--epochs", "2", "--model", "cnn"]
    path = script(cluster.folder, "hybrid", "--nodes", "2", "--ranks-per-node", "2", "--", *words)
    job = cluster.submit(path)
    [record] = cluster.wait(job, LIMIT)
    check_ended_well(cluster, [record])
    check_blocks(result(cluster.folder / "runs" / job), blocks=2, replicas=2)
