"""Makes one run of compare for real: a job of stalempi-bench train, in time that passes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalempi.errors import StalempiError
from stalempi.simulate.figures import Figures
from stalempi.simulate.sweep import Outcome, parse_policy
from stalempi.train.evaluate import Point

__all__ = ["RealRuns", "figures_of"]

_LIMIT = 3600.0  # seconds after which a run is given up


@dataclass(frozen=True)
class RealRuns:
    """What all runs have in common: train's words but for policy and seed; ranks, one less without a server."""

    ranks: int
    words: Sequence[str]

    def run(self, label: str, seed: int) -> Outcome:
        """Trains under the policy that `label` says; StalempiError with the job's own words if it fails."""
        with tempfile.TemporaryDirectory() as out:
            self._train(label, seed, "--out", out)
            result = json.loads(Path(out, "result.json").read_text(encoding="utf-8"))
        return Outcome(figures_of(result), tuple(Point(**point) for point in result["curve"]))

    def command_line(self, label: str, seed: int) -> str:
        """Returns the launcher's command line of a run that is not made."""
        return self._train(label, seed, "--dry-run")

    def _train(self, label: str, seed: int, *words: str) -> str:
        """Calls stalempi-bench train and returns what it printed."""
        policy = parse_policy(label)
        given = [word for key, value in policy.options().items() if key != "eps" for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "stalempi.bench", "train", "-n", str(self.ranks - (not policy.has_server))]
        command += ["--policy", policy.name, *given, *self.words, "--seed", str(seed), *words]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if line.startswith("stalempi")), done.stderr)
            raise StalempiError(f"{label}, seed {seed} failed: {said}")
        return done.stdout


def figures_of(result: Mapping[str, Any]) -> Figures:
    """Returns the figures of a result.json, as `Figures.of` does those of a run at hand."""
    workers, seconds = result["workers"], max(result["seconds"], 1e-12)
    pushes = [worker["iterations"] for worker in workers]
    applied = [worker["iterations"] - worker["dropped"] - worker["nonfinite"] - worker["skipped"] for worker in workers]
    return Figures(
        seconds=result["seconds"],
        gradients_per_second=sum(applied) / seconds,
        updates_per_second=result["updates"] / seconds,
        wait_share=sum(worker["wait_share"] for worker in workers) / len(workers),
        gap_mean=_mean([worker["gap_mean"] for worker in workers], pushes),
        gap_max=max(worker["gap_max"] for worker in workers),
        staleness_mean=_mean([worker["staleness_mean"] for worker in workers], applied),
        staleness_max=max(worker["staleness_max"] for worker in workers),
    )


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1, sum(weights))
