"""stalempi-bench train does the main job from one command, and says what it did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stalempi.policy import make_policy
from stalempi.trace import read_trace, replay
from stalempi.train.models import build_model
from tests.launch import mpirun

pytestmark = pytest.mark.mpi
BENCH = Path(sys.executable).with_name("stalempi-bench")


def test_the_main_job_reaches_its_accuracy_and_writes_it_down(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    words = ["train", "-n", "3", "--policy", "dssp", "--out", str(tmp_path), "--trace", str(trace)]
    done = subprocess.run([BENCH, *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["accuracy"] >= 0.97
    assert result["samples"] >= 20 * 1437
    assert result["samples"] == sum(worker["samples"] for worker in result["workers"])
    assert result["updates"] == sum(worker["iterations"] for worker in result["workers"])
    keys = {"iterations", "samples_per_second", "wait_share", "gap_mean", "gap_max", "staleness_mean"}
    assert all(keys <= set(worker) and worker["gap_max"] <= 16 for worker in result["workers"])
    assert "test accuracy" in done.stdout
    model = build_model("cnn", num_classes=10, input_shape=(1, 8, 8))
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    recorded = read_trace(trace)
    assert len(recorded.records) == result["updates"] + 2
    assert replay(recorded, make_policy("dssp", lower=3, upper=15)) == []


def test_it_also_runs_under_a_launcher_of_the_users_choice() -> None:
    words = "-m stalempi.bench train --policy bsp --epochs 1 --slow 1=1.5 --emulate-ms 0.1".split()
    done = mpirun(words, 3)
    assert done.code == 0, done.err
    assert "emulated: --slow 1=1.5, --emulate-ms 0.1" in done.out


def test_a_language_model_learns_text_and_its_tied_matrix_stays_one(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh" * 1500)
    words = f"train -n 3 --policy ssp --bound 1 --dataset text --data-dir {tmp_path}/text.txt --sequence-length 16"
    words += f" --model transformer-tiny-tied --lr 0.1 --epochs 2 --out {tmp_path}"
    done = subprocess.run([BENCH, *words.split()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "transformer-tiny-tied on text (674 samples)" in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["accuracy"] > 0.5
    assert result["loss"] < 2.0
    model = build_model("transformer-tiny-tied", num_classes=256, input_shape=(16,))
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(state["logits.weight"], state["embed.tokens.weight"])
    model.load_state_dict(state, strict=True)


def test_a_number_of_ranks_that_the_launcher_did_not_start_is_refused() -> None:
    done = mpirun("-m stalempi.bench train -n 4".split(), 3)
    assert done.code == 2
    assert done.err.count("the launcher started 3 ranks") == 1


def test_a_batch_larger_than_a_shard_is_refused_once() -> None:
    done = mpirun("-m stalempi.bench train --batch-size 2000".split(), 3)
    assert done.code == 2
    assert done.err.count("larger than a shard") == 1
    assert "Traceback" not in done.err


def test_without_a_server_the_same_command_trains_on_every_rank(tmp_path: Path) -> None:
    words = ["train", "-n", "2", "--policy", "allreduce", "--epochs", "8", "--evaluate-every", "2000"]
    done = subprocess.run(
        [BENCH, *words, "--out", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert "allreduce(), 2 worker(s)" in done.stdout
    assert result["accuracy"] >= 0.9
    assert len(result["curve"]) >= 5
    assert result["updates"] == result["workers"][0]["iterations"] == result["workers"][1]["iterations"]
    assert result["samples"] == sum(worker["samples"] for worker in result["workers"]) >= 8 * 1437
    assert torch.load(tmp_path / "model.pt", weights_only=True)
