"""Trains on real CIFAR-10 images with every policy, through stalempi-bench train, and prints the table.

python benchmarks/cifar_policies/measure.py FOLDER, an ImageFolder tree with train/CLASS and test/CLASS.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

POLICIES = {
    "BSP": "--policy bsp",
    "ASP": "--policy asp",
    "SSP(3)": "--policy ssp --bound 3",
    "SSP(3), cached pulls": "--policy ssp-cached --bound 3",
    "SSP(15)": "--policy ssp --bound 15",
    "DSSP(3, 15)": "--policy dssp --lower 3 --upper 15",
    "DSSP(3, 15), paper": "--policy dssp --lower 3 --upper 15 --controller paper",
}
COMMON = "-n 3 --dataset imagefolder --model cnn --batch-size 64 --epochs 6 --lr 0.02 --momentum 0.5"
SEEDS = (0, 1)


def run(words: str, folder: Path, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        command = [str(Path(sys.executable).with_name("stalempi-bench")), "train", *words.split()]
        command += ["--data-dir", str(folder), "--seed", str(seed), "--out", out]
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(Path(out, "result.json").read_text(encoding="utf-8"))
    return result


def row(name: str, results: list[dict[str, Any]]) -> str:
    def mean(pick: Any) -> float:
        return statistics.mean(float(pick(result)) for result in results)

    accuracies = [100 * result["accuracy"] for result in results]
    spread = max(accuracies) - min(accuracies)
    return (
        f"| {name} | {statistics.mean(accuracies):.1f} ({spread:.1f}) "
        f"| {100 * mean(lambda r: statistics.mean(w['wait_share'] for w in r['workers'])):.0f}% "
        f"| {mean(lambda r: statistics.mean(w['gap_mean'] for w in r['workers'])):.1f} "
        f"/ {max(w['gap_max'] for r in results for w in r['workers'])} "
        f"| {mean(lambda r: statistics.mean(w['staleness_mean'] for w in r['workers'])):.2f} |"
    )


def main() -> None:
    folder = Path(sys.argv[1])
    print("| policy | accuracy %, mean (spread) | waiting | gap mean / max | staleness |")
    print("| --- | --- | --- | --- | --- |")
    for name, words in POLICIES.items():
        results = [run(f"{COMMON} {words}", folder, seed) for seed in SEEDS]
        print(row(name, results), flush=True)


if __name__ == "__main__":
    main()
