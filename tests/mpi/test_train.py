"""stalempi-bench train does the main job from one command, and says what it did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

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
    words += f" --model transformer-tiny-tied --optimizer adam --lr 0.003 --epochs 4 --out {tmp_path}"
    done = subprocess.run([BENCH, *words.split()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "transformer-tiny-tied on text (674 samples)" in done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["accuracy"] > 0.5
    assert result["loss"] < 2.0
    model = build_model("transformer-tiny-tied", num_classes=256, input_shape=(16,))
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(state["logits.weight"], state["embed.tokens.weight"])
    model.load_state_dict(state, strict=True)


def write_images(root: Path) -> None:
    """Writes 2 classes of 16 images for training and 4 for testing, ImageNet's folders."""
    for split, count in (("train", 16), ("val", 4)):
        for label, name in enumerate(("dark", "light")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (20, 18), (100 * label + number,) * 3).save(folder / f"{number}.png")


def test_everything_that_a_run_may_be_asked_for_at_once(tmp_path: Path) -> None:
    """Images decoded in processes of their own, and what the options say found again in log, metrics and result."""
    write_images(tmp_path)
    out = tmp_path / "out"
    words = "-m stalempi.bench train --policy bsp --dataset imagenet --image-size 16 --loader-processes 1 --epochs 6"
    words += (
        " --batch-size 4 --accumulate 2 --clip-norm 1 --clip-value 1 --weight-decay 0.01 --no-decay-norm --amp bf16"
    )
    words += " --schedule cosine --warmup 0.2 --scale-lr --lr 0.01 --nonfinite skip --log-level debug"
    words += f" --log-interval 0.05 --data-dir {tmp_path} --tensorboard {out / 'board'} --out {out}"
    done = mpirun(words.split(), 3, timeout=240)
    assert done.code == 0, done.err
    assert "[server, rank 0] an update stands for 4 x 4 samples; learning rate 0.01 x 4" in done.err
    assert "[worker 1, rank 2] left after 12 steps" in done.err
    assert "warn" not in done.err.lower()
    result = json.loads((out / "result.json").read_text())
    assert (result["samples"], result["updates"]) == (6 * 32, 12)
    assert result["lr"]["scaled"] == pytest.approx(0.04)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["samples"] == 6 * 32
    assert rows[-1]["lr"] == result["lr"]["last"] < 0.005
    assert [row["samples"] for row in rows] == sorted(row["samples"] for row in rows)
    assert max(row["lr"] for row in rows) > 0.02
    [events] = (out / "board").iterdir()
    assert b"worker 1/wait_share" in events.read_bytes()


def test_workers_are_quiet_and_the_server_can_be() -> None:
    done = mpirun("-m stalempi.bench train --policy asp --epochs 1 --log-level warning".split(), 2)
    assert done.code == 0, done.err
    assert done.err == ""
    assert "test accuracy" in done.out


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
    assert "allreduce(), 2 worker(s)" in done.stderr
    assert result["accuracy"] >= 0.9
    assert len(result["curve"]) >= 5
    assert result["lr"]["last"] == pytest.approx(0.02 * 0.1**2)  # after both decays
    assert result["updates"] == result["workers"][0]["iterations"] == result["workers"][1]["iterations"]
    assert result["samples"] == sum(worker["samples"] for worker in result["workers"]) >= 8 * 1437
    assert torch.load(tmp_path / "model.pt", weights_only=True)
