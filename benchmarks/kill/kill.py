"""Kills a whole job at 50 random moments and looks at what is left: python benchmarks/kill/kill.py [KILLS].

The job saves all the time, so about half of the kills hit the middle of a save. After each kill the newest checkpoint
must be whole, the next start must go on from it, and at the end the books must balance: every push applied once.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stalempi.train.checkpoint import CheckpointStore

TOTAL = 10**9
LIMIT = 300.0


def command(folder: Path, *words: str) -> list[str]:
    options = ["--policy", "dssp", "--lower", "1", "--upper", "4", "--lr-decay", "", "--seed", "3"]
    options += ["--checkpoint-dir", str(folder), "--checkpoint-every", "64", *words]
    return [sys.executable, "-m", "stalempi.bench", "train", "-n", "3", *options]


def saved(folder: Path) -> dict[str, int]:
    """Returns samples, pushes and updates of the newest checkpoint; checks its own books."""
    newest = CheckpointStore(folder).newest()
    if newest is None:
        return {"samples": 0, "pushes": 0, "updates": 0}
    stats = CheckpointStore.load_part(newest, "server")["stats"]
    for part in ("model", "optimizer", "workers"):
        CheckpointStore.load_part(newest, part)
    pushes = sum(worker["iterations"] for worker in stats["workers"])
    assert stats["samples"] == sum(worker["samples"] for worker in stats["workers"])
    assert stats["updates"] == pushes == sum(worker["applied"] for worker in stats["workers"])
    return {"samples": stats["samples"], "pushes": pushes, "updates": stats["updates"]}


def processes(folder: Path) -> list[int]:
    """Returns every process of the job: launcher and ranks name the folder in their command lines."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(folder) in words and int(place.name) != os.getpid():
            found.append(int(place.name))
    return found


def kill_once(folder: Path, draws: random.Random) -> tuple[bool, float]:
    """Runs a job until it has saved something new and a random while longer; returns whether it hit a save."""
    before = {path.name for path in CheckpointStore(folder).whole()}
    job = subprocess.Popen(
        command(folder, "--samples", str(TOTAL)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + LIMIT
    while {path.name for path in CheckpointStore(folder).whole()} <= before:
        assert time.monotonic() < until, "no checkpoint came"
        assert job.poll() is None, "the job did not go on from its checkpoint"
        time.sleep(0.01)
    wait = draws.uniform(0.0, 0.5)
    time.sleep(wait)
    for pid in processes(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.wait()
    return any(folder.glob(".partial-checkpoint-*")), wait


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    draws = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        folder, before, hits = Path(place), 0, 0
        print("| kill | after the first save, s | in a save | samples saved |")
        print("| ---: | ---: | --- | ---: |")
        for number in range(1, kills + 1):
            hit, wait = kill_once(folder, draws)
            found = saved(folder)
            assert found["samples"] > before, "a kill lost a checkpoint"
            before = found["samples"]
            hits += hit
            print(f"| {number} | {wait:.2f} | {'yes' if hit else 'no'} | {found['samples']} |", flush=True)
        subprocess.run(command(folder, "--samples", str(before + 500)), check=True, stdout=subprocess.DEVNULL)
        final = saved(folder)
        print(f"\n{kills} kills, {hits} in the middle of a save; the last run ended by itself: {final}")


main()
