"""Trains a small network on real CIFAR-10 images with every form of pushes, and prints accuracy and bytes.

python benchmarks/compression/measure.py FOLDER: FOLDER is an ImageFolder tree (train/CLASS, test/CLASS).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2)
FORMS = ("none", "fp16", "bf16", "topk:0.1", "topk:0.01")
COMMON = (
    "-n 3 --policy bsp --dataset imagefolder --model cnn --batch-size 32 --epochs 8 --lr 0.05 --momentum 0.9 "
    "--schedule cosine --warmup 0.1"
)


def run(folder: Path, form: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "stalempi.bench", "train", *COMMON.split(), "--compress", form]
        command += ["--data-dir", str(folder), "--seed", str(seed), "--out", out]
        subprocess.run(command, check=True, timeout=1200, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(Path(out, "result.json").read_text(encoding="utf-8"))
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    print("| form | KB a push | of none | test accuracy %, mean (each seed) |")
    print("| --- | ---: | ---: | --- |")
    plain = 0.0
    for form in FORMS:
        runs = [run(folder, form, seed) for seed in SEEDS]
        workers = [worker for result in runs for worker in result["workers"]]
        size = statistics.mean(worker["bytes_pushed"] / worker["iterations"] for worker in workers)
        plain = plain or size
        each = [100 * result["accuracy"] for result in runs]
        cells = [f"{size / 1e3:.0f}", f"{100 * size / plain:.0f}%"]
        cells += [f"{statistics.mean(each):.1f} ({', '.join(f'{value:.1f}' for value in each)})"]
        print(f"| {form} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
