"""A real job that was stopped by a signal or killed goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from stalempi.errors import ConfigError
from stalempi.train.checkpoint import CheckpointStore
from stalempi.train.models import build_model
from tests.launch import MPICH, Finished, mpirun, start

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("programs") / "resume.py"
LIMIT = 120.0
TOTAL = "240"


def result(done: Finished) -> str:
    assert done.code == 0, done.err
    return next(line for line in done.out.splitlines() if line.startswith("digest"))


NO_MPICH = pytest.mark.skipif(MPICH is None, reason="no MPICH here: scripts/test puts one in .mpich")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run says of itself that nothing has stopped."""
    return result(mpirun(PROGRAM, 3, str(tmp_path_factory.mktemp("whole")), "bsp", TOTAL, timeout=LIMIT))


@pytest.mark.parametrize(
    ("rank", "word", "mpich"), [(1, "SIGUSR1", False), pytest.param(2, "SIGTERM", True, marks=NO_MPICH)]
)
def test_a_signal_to_a_rank_saves_and_stops_all_and_the_resumed_run_equals_an_unbroken_one(
    tmp_path: Path, unbroken: str, rank: int, word: str, mpich: bool
) -> None:
    words = [str(tmp_path), "bsp", TOTAL]
    stopped = mpirun(PROGRAM, 3, *words, str(rank), "11", word, timeout=LIMIT, mpich=mpich)
    assert stopped.code == 75, stopped.err
    assert stopped.err.count("stalempi: stopped by a signal to another rank") == 1
    assert len(CheckpointStore(tmp_path).whole()) == 1
    assert result(mpirun(PROGRAM, 3, *words, timeout=LIMIT, mpich=mpich)) == unbroken


def test_several_servers_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    servers = {"SERVERS": "2"}
    words = [str(tmp_path / "broken"), "bsp", TOTAL]
    stopped = mpirun(PROGRAM, 4, *words, "3", "11", "SIGUSR1", timeout=LIMIT, env=servers)
    assert stopped.code == 75, stopped.err
    assert len(CheckpointStore(tmp_path / "broken").whole()) == 1
    whole = mpirun(PROGRAM, 4, str(tmp_path / "whole"), "bsp", TOTAL, timeout=LIMIT, env=servers)
    assert result(mpirun(PROGRAM, 4, *words, timeout=LIMIT, env=servers)) == result(whole)


def test_groups_that_a_signal_to_a_member_stopped_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    groups = {"GROUP": "2"}
    words = [str(tmp_path / "broken"), "bsp", TOTAL]
    stopped = mpirun(PROGRAM, 5, *words, "2", "5", "SIGUSR1", timeout=LIMIT, env=groups)
    assert stopped.code == 75, stopped.err
    whole = mpirun(PROGRAM, 5, str(tmp_path / "whole"), "bsp", TOTAL, timeout=LIMIT, env=groups)
    assert result(mpirun(PROGRAM, 5, *words, timeout=LIMIT, env=groups)) == result(whole)


@NO_MPICH
def test_mpich_forwards_sigterm_to_the_ranks(tmp_path: Path) -> None:
    job = start(PROGRAM, 3, str(tmp_path), "dssp", "1000000", env={"EVERY": "80", "PAUSE": "0.005"}, mpich=True)
    wait_for_more(tmp_path, -1)
    job.process.send_signal(signal.SIGTERM)
    done = job.finish(LIMIT)
    assert done.code == 75, done.err
    assert "stopped by SIGTERM" in done.err


def test_without_a_folder_a_signal_to_the_server_stops_the_job_cleanly() -> None:
    done = mpirun(PROGRAM, 3, "none", "ssp", "1000000", "0", "0", "SIGTERM", timeout=LIMIT)
    assert done.code == 75, done.err
    assert "stopped by SIGTERM after" in done.err
    assert "no checkpoint, since no folder for them was given" in done.err
    assert "Traceback" not in done.err


def test_a_job_that_does_not_stop_in_time_is_ended_hard(tmp_path: Path) -> None:
    environment = {"GRACE": "1", "HANG": "1"}
    done = mpirun(PROGRAM, 3, str(tmp_path), "bsp", TOTAL, "1", "3", "SIGTERM", timeout=LIMIT, env=environment)
    assert done.code == 75, done.err
    assert "SIGTERM was not obeyed within 1 s" in done.err


def test_a_job_killed_at_any_moment_goes_on_and_its_books_balance(tmp_path: Path) -> None:
    """Kills every process of the job at random moments, most of them while a checkpoint is being written."""
    draws, before = random.Random(4), -1
    for _ in range(3):
        environment = {"EVERY": "8", "PAUSE": "0.002"}
        job = start(PROGRAM, 3, str(tmp_path), "dssp", "1000000", env=environment)
        wait_for_more(tmp_path, before)
        time.sleep(draws.uniform(0, 0.3))
        os.killpg(job.process.pid, signal.SIGKILL)
        for pid in ranks_of(job.process.pid, tmp_path):
            os.kill(pid, signal.SIGKILL)
        job.finish(LIMIT)
        newest = CheckpointStore(tmp_path).newest()
        assert newest is not None
        stats = CheckpointStore.load_part(newest, "server")["stats"]
        assert stats["samples"] == sum(w["samples"] for w in stats["workers"]) > before
        before = stats["samples"]
    words = result(mpirun(PROGRAM, 3, str(tmp_path), "dssp", str(before + 40), timeout=LIMIT)).split()
    samples, updates, applied, pushed = int(words[3]), *map(int, words[5:8])
    assert samples >= before + 40
    assert updates == applied == pushed
    assert samples == 4 * applied


def wait_for_more(folder: Path, samples: int) -> None:
    """Waits for a checkpoint of more than `samples` samples."""
    until = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < until, "no checkpoint came"
        time.sleep(0.05)
        with suppress(ConfigError, OSError):  # the oldest may be removed while it is read
            newest = CheckpointStore(folder).newest() if folder.is_dir() else None
            if newest and CheckpointStore.load_part(newest, "server")["stats"]["samples"] > samples:
                return


def ranks_of(launcher: int, folder: Path) -> list[int]:
    """Returns what is left of a job whose launcher was killed: its ranks have sessions of their own."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(folder) in words and int(place.name) != launcher:
            found.append(int(place.name))
    return found


def test_the_bench_saves_stops_and_goes_on_from_one_command(tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "out"
    words = (
        f"-m stalempi.bench train --policy ssp --bound 2 --epochs 1000 --checkpoint-dir {folder} --out {out}".split()
    )
    job = start([*words, "--checkpoint-every", "500"], 3)
    wait_for_more(folder, -1)
    job.process.send_signal(signal.SIGUSR1)
    stopped = job.finish(LIMIT)
    assert stopped.code == 75, stopped.err
    assert "stopped by SIGUSR1" in stopped.err
    assert not (out / "result.json").exists()
    newest = CheckpointStore(folder).newest()
    assert newest is not None
    saved = CheckpointStore.load_part(newest, "server")["stats"]["samples"]
    model = build_model("cnn", num_classes=10, input_shape=(1, 8, 8))
    model.load_state_dict(torch.load(newest / "model.pt", weights_only=True), strict=True)
    done = mpirun([*words, "--samples", str(saved + 500)], 4, timeout=LIMIT)
    assert done.code == 0, done.err
    assert f"resumed from {newest} at {saved} samples" in done.err
    figures = json.loads((out / "result.json").read_text())
    everybody = [*figures["workers"], *figures["former_workers"]]
    assert len(figures["workers"]) == 3
    assert figures["samples"] == sum(worker["samples"] for worker in everybody) >= saved + 500
