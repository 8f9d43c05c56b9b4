"""Submits batch jobs to the Slurm of scripts/slurm-up and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from stalempi.bench.slurm import slurm

__all__ = ["Cluster", "Record", "script"]

Record = dict[str, str]

_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"}


def script(folder: Path, kind: str, *words: str) -> Path:
    """Writes what stalempi-bench slurm prints, for cores that many jobs share; `words` may hold -- and what follows."""
    done = CliRunner().invoke(slurm, ["--kind", kind, "--cpus-per-task", "1", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    path = folder / f"{kind}.sbatch"
    path.write_text(done.output, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Cluster:
    """A Slurm that runs; jobs lie in `folder`."""

    conf: Path
    folder: Path

    def submit(self, *words: str | Path) -> str:
        """Submits a job with the words of sbatch and returns its id."""
        return self._run("sbatch", "--parsable", *map(str, words)).split(";")[0].strip()

    def records(self, job: str) -> list[Record]:
        """Returns what Slurm knows of the job; of an array or a heterogeneous job, of each of its parts."""
        text = self._run("scontrol", "--oneliner", "show", "job", job)
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines() if line]

    def wait(self, job: str, timeout: float) -> list[Record]:
        """Waits until every part of the job has ended; fails, and cancels it, after `timeout` seconds."""
        return self.wait_for(job, lambda one: one["JobState"] in _ENDED, timeout)

    def wait_for(self, job: str, is_so: Callable[[Record], bool], timeout: float) -> list[Record]:
        """Waits until `is_so` of every part of the job; fails, and cancels it, after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            records = self.records(job)
            if all(is_so(one) for one in records):
                return records
            if time.monotonic() > end:
                self._run("scancel", job)
                raise AssertionError(f"job {job} took more than {timeout:g} s: {records}\n{self.log()}")
            time.sleep(0.2)

    def warn(self, job: str) -> None:
        """Sends the job what Slurm sends before a preemption or the time limit: SIGUSR1, to the batch script only."""
        self._run("scancel", "--batch", "--signal=USR1", job)

    def log(self) -> str:
        """Returns what jobs and ranks have written so far, to say why a test failed."""
        paths = [*self.folder.glob("*.out"), *self.folder.glob("runs/**/rank-*")]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(paths))

    def _run(self, *command: str) -> str:
        given = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "STALEMPI_"))}
        path = f"{Path(sys.executable).parent}:{given['PATH']}"
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment = given | root | {"PATH": path, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout
