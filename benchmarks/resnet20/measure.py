"""Trains ResNet-20 on real CIFAR-10 images in one process and under each policy, and prints the table.

python benchmarks/resnet20/measure.py FOLDER RESULTS: FOLDER is an ImageFolder tree (train/CLASS, test/CLASS). Each run
leaves one file in RESULTS, and a run whose file is there is not repeated: stop it when you like and start it again.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stalempi.train.datasets import load_dataset
from stalempi.train.evaluate import evaluate
from stalempi.train.loader import DataLoader
from stalempi.train.models import build_model
from stalempi.train.sampler import DistributedSampler
from stalempi.train.schedule import Cosine, Warmup

SEEDS = (0, 1, 2)
EPOCHS = 5
BATCH = 128  # samples of one process, and of two workers under BSP together
LR, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 1e-4  # LR is for BATCH samples an update
WARMUP = 0.1
EVERY = 5_000  # global samples between two tests

# BSP's update stands for both workers' batches, any other policy's for one worker's: half the samples, half the rate.
POLICIES = {
    "BSP": f"--policy bsp --lr {LR}",
    "SSP(3)": f"--policy ssp --bound 3 --lr {LR / 2}",
    "DSSP(3, 15)": f"--policy dssp --lower 3 --upper 15 --lr {LR / 2}",
    "ASP": f"--policy asp --lr {LR / 2}",
}
COMMON = (
    f"-n 3 --dataset imagefolder --model resnet20 --batch-size {BATCH // 2} --epochs {EPOCHS} --momentum {MOMENTUM} "
    f"--weight-decay {WEIGHT_DECAY} --schedule cosine --warmup {WARMUP} --evaluate-every {EVERY}"
)
ALONE = "one process"


def alone(folder: Path, seed: int) -> dict[str, Any]:
    """Plain torch: the same images in the same order, and the same first weights, without stalempi's optimizer."""
    torch.manual_seed(seed)
    data = load_dataset("imagefolder", data_dir=folder, seed=seed)
    model = build_model("resnet20", num_classes=data.num_classes, input_shape=data.input_shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    total = EPOCHS * len(data.train)
    rise = round(WARMUP * total)
    schedule = Warmup(rise) * Cosine(total, start=rise)
    loader = DataLoader(
        data.train, BATCH, sampler=DistributedSampler(data.train, num_workers=1, worker_rank=0, seed=seed)
    )
    samples, due, curve, tested, began = 0, EVERY, [], 0.0, time.monotonic()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = LR * schedule(samples)
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            samples += len(x)
            if samples >= due or samples >= total:
                pause = time.monotonic()
                accuracy, loss = evaluate(model, data.test, device=torch.device("cpu"))
                curve.append({"samples": samples, "accuracy": accuracy, "loss": loss})
                due, tested = samples + EVERY, tested + time.monotonic() - pause
    seconds = time.monotonic() - began - tested
    return {"accuracy": curve[-1]["accuracy"], "samples": samples, "seconds": seconds, "workers": [], "curve": curve}


def job(words: str, folder: Path, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "stalempi.bench", "train", *COMMON.split(), *words.split()]
        command += ["--data-dir", str(folder), "--seed", str(seed), "--out", out]
        subprocess.run(command, check=True, timeout=3600, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(Path(out, "result.json").read_text(encoding="utf-8"))
    return result


def run(name: str, folder: Path, results: Path, seed: int) -> None:
    file = results / f"{''.join(c if c.isalnum() else '-' for c in name)}.{seed}.json"
    if file.exists():
        return
    print(f"{time.strftime('%H:%M')} {name}, seed {seed}", file=sys.stderr, flush=True)
    found = alone(folder, seed) if name == ALONE else job(POLICIES[name], folder, seed)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(found | {"name": name, "seed": seed}, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def table(results: Path) -> list[str]:
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("*.json"))]
    lines = [
        "| | accuracy %, mean (each seed) | at 5k samples | at 10k | at 15k | waiting | gap mean / max | staleness |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in (ALONE, *POLICIES):
        mine = [result for result in found if result["name"] == name]
        if mine:
            lines.append(row(name, mine))
    return lines


def row(name: str, runs: list[dict[str, Any]]) -> str:
    def mean(values: list[float]) -> float:
        return statistics.mean(values)

    each = [100 * run["accuracy"] for run in runs]
    cells = [name, f"**{mean(each):.1f}** ({', '.join(f'{value:.1f}' for value in each)})"]
    cells += [f"{100 * mean([run['curve'][place]['accuracy'] for run in runs]):.1f}" for place in range(3)]
    workers = [worker for run in runs for worker in run["workers"]]
    if workers:
        cells += [f"{100 * mean([worker['wait_share'] for worker in workers]):.0f}%"]
        cells += [f"{mean([w['gap_mean'] for w in workers]):.1f} / {max(w['gap_max'] for w in workers)}"]
        cells += [f"{mean([worker['staleness_mean'] for worker in workers]):.2f}"]
    else:
        cells += [""] * 3
    return f"| {' | '.join(cells)} |"


def main() -> None:
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    results.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    for seed in SEEDS:
        for name in (ALONE, *POLICIES):
            run(name, folder, results, seed)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
