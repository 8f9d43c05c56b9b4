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
from stalempi.simulate.learning import Point
from stalempi.simulate.sweep import Outcome, parse_policy

__all__ = ["RealRuns", "figures_of"]

_LIMIT = 3600.0  # seconds after which a run is given up


@dataclass(frozen=True)
class RealRuns:
    """What all runs have in common: the number of ranks, and train's words but for policy and seed."""

    ranks: int
    words: Sequence[str]

    def run(self, label: str, seed: int) -> Outcome:
        """Trains under the policy that `label` says; StalempiError with the job's own words if it fails."""
        policy = parse_policy(label)
        given = [word for key, value in policy.options().items() if key != "eps" for word in (f"--{key}", str(value))]
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-m", "stalempi.bench", "train", "-n", str(self.ranks)]
            command += ["--policy", policy.name, *given, *self.words, "--seed", str(seed), "--out", out]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT, check=False
            )
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "stalempi" in line), done.stderr)
                raise StalempiError(f"{label}, seed {seed} failed: {said}")
            result = json.loads(Path(out, "result.json").read_text(encoding="utf-8"))
        return Outcome(figures_of(result), tuple(Point(**point) for point in result["curve"]))


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
