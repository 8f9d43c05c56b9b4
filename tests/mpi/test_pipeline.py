"""A pipeline over MPI equals the one-process run of its schedule bit for bit, whatever the timing."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launch import mpirun, start
from tests.mpi.test_resume import ranks_of

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("programs") / "pipeline_equal.py"
EACH = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_every_method_equals_its_one_process_run_with_random_delays(blocks: int) -> None:
    done = mpirun(PROGRAM, blocks, env=EACH, timeout=240)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == blocks * (13 if blocks == 3 else 10)
    assert [line for line in lines if not line.endswith(" differ")] == []


def test_the_published_configurations_have_the_staleness_that_they_say() -> None:
    done = mpirun(PROGRAM, 3, env=EACH, flags=["--mca", "btl", "self,tcp"], timeout=240)
    assert done.code == 0, done.err
    for config, staleness in [("1,1,0;4,2,0", (4, 2, 0)), ("2,2,0;6,3,0", (6, 3, 0)), ("5,5,0;14,7,0", (14, 7, 0))]:
        for block, updates in enumerate(staleness):
            assert [f"{block} dsp({config})", f"staleness {updates} differ"] in [
                [line.split(") ")[0] + ")", line[line.index("staleness") :]] for line in done.out.splitlines()
            ]


USES = Path(__file__).with_name("programs") / "pipeline_uses.py"


def test_a_model_is_cut_by_its_times_at_names_on_the_meta_device_and_with_shared_parameters(tmp_path: Path) -> None:
    done = mpirun(USES, 3, str(tmp_path / "model.pt"), "auto", "exported", "meta", "language", timeout=240)
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["auto 0.0", "exported 122 2", "meta True", "language 0.000000 True"]


def test_copies_of_a_pipeline_train_as_one_on_the_joined_batch() -> None:
    done = mpirun(USES, 4, "-", "replicas", timeout=120)
    assert done.code == 0, done.err
    name, difference, samples = done.out.split()
    assert (name, samples) == ("replicas", "80")
    assert float(difference) < 1e-6


FAILS = Path(__file__).with_name("programs") / "pipeline_fails.py"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", r"rank 1 \(block 1\) step 4 failed:\nTraceback"),
        ("killed", "rank 1"),
        # block 1 is wrong in a forward or in the recompute beside it: block 2 meets the one, block 1 the other
        ("shape", r"rank ([12]) \(block \1\) step \d failed:\nTraceback"),
        ("order", "got batch"),
        ("larger", "batch 9 from rank 0 to rank 1: its tensors changed from 128 bytes of float32 to 256 bytes"),
        ("nan", r"rank 2 \(block 2\) step 10 failed: the loss is nan"),
    ],
)
def test_a_block_that_fails_ends_the_job_and_is_named(how: str, said: str) -> None:
    done = mpirun(FAILS, 3, how, timeout=60)
    assert done.code not in (None, 0), done.err
    assert re.search(said, done.err), done.err
    assert done.err.count("Traceback") == (how in ("raises", "shape"))


def test_large_labels_of_many_micro_batches_do_not_wait_for_one_another() -> None:
    done = mpirun(PROGRAM.with_name("pipeline_labels.py"), 2, env=EACH, timeout=120)
    assert done.code == 0, done.err
    assert len([line for line in done.out.splitlines() if line.endswith("done")]) == 8


def test_a_pipeline_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    done = mpirun(PROGRAM.with_name("pipeline_resume.py"), 3, str(tmp_path), env=EACH, timeout=120)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len([line for line in lines if line.endswith(" differ")]) == 3 * 5, done.out
    assert len([line for line in lines if "is of method dsp(1,1,0;4,2,0), this run is of method fr:" in line]) == 3


def test_copies_go_on_with_the_statistics_predictors_and_random_numbers_that_each_had(tmp_path: Path) -> None:
    done = mpirun(PROGRAM.with_name("pipeline_resume.py"), 4, str(tmp_path), "copies", env=EACH, timeout=120)
    assert done.code == 0, done.err
    assert len([line for line in done.out.splitlines() if line.endswith(" differ")]) == 4 * 3, done.out


def test_the_command_stops_at_a_signal_with_code_75_and_goes_on(tmp_path: Path) -> None:
    words = ["-m", "stalempi.bench", "pipeline", "--method", "dsp", "--model", "cnn", "--epochs", "20", "--out"]
    words += [str(tmp_path / "out"), "--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "1000"]
    words += ["--checkpoint-keep", "3", "--trace", str(tmp_path / "trace")]
    running = start([*words, "--emulate-ms", "2,2,4"], 3)
    until = time.monotonic() + 100
    while not any((tmp_path / "saved").glob("checkpoint-*")):
        assert time.monotonic() < until, "no checkpoint came"
        time.sleep(0.05)
    os.kill(ranks_of(running.process.pid, tmp_path / "saved")[-1], signal.SIGUSR1)  # any one rank
    done = running.finish(160)
    assert "asked to stop at" in done.err, done.err
    assert done.code == 75
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["lr"] == 0.02
    for block in range(3):
        lines = (tmp_path / f"trace.{block}").read_text().splitlines()
        updates = [line for line in lines if json.loads(line)["action"].startswith("U")]
        assert len(updates) == rows[-1]["samples"] // 32, "what happened until the signal"
    done = mpirun([*words, "--batch-size", "16"], 3, timeout=120)
    assert done.code == 2
    assert "is of batch size 32, this run is of batch size 16: resume it as it was" in done.err
    assert done.err.count("error:") == 1
    done = mpirun(words, 3, timeout=120)
    assert done.code == 0, done.err
    assert "going on from" in done.err
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [block["steps"] for block in found["blocks"]] == [20 * 44] * 3
    assert [block["updates"] for block in found["blocks"]] == [20 * 44] * 3
    assert found["samples"] == 20 * 44 * 32
    assert found["accuracy"] > 0.9
    assert len(list((tmp_path / "saved").glob("checkpoint-*"))) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--trace /nowhere/x", "--trace /nowhere/x: there is no folder /nowhere"),
        ("--method gpipe --batch-size 3", "--batch-size 3 cannot be cut into 4 micro-batches"),
    ],
)
def test_ranks_started_by_hand_find_at_the_start_what_cannot_be(words: str, said: str) -> None:
    done = mpirun(["-m", "stalempi.bench", "pipeline", *words.split()], 2, timeout=60)
    assert done.code == 2, done.err
    assert said in done.err
    assert done.err.count("error:") == 1
    assert "Traceback" not in done.err
