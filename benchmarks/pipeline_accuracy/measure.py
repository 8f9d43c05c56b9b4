"""Trains a small ResNet on real CIFAR-10 images by every pipeline method, and prints their accuracies in one table.

python -m benchmarks.pipeline_accuracy.measure FOLDER, an ImageFolder tree (train/CLASS, test/CLASS).

Each run is the one-process reference of its method (`stalempi.pipeline.reference`), which makes the bits of a job over
MPI without its overhead; `--mpi METHOD` trains one method over MPI instead, for comparison. A run that has its file in
`--results` is not made again, so an interrupted measurement goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import stalempi
from stalempi.bench.launch import find_launcher, is_launched, launch_command
from stalempi.errors import NonFiniteError
from stalempi.pipeline.build import BlockOptions
from stalempi.pipeline.reference import Reference
from stalempi.pipeline.split import split
from stalempi.pipeline.update import UpdateOptions
from stalempi.train.data import Data
from stalempi.train.datasets import load_dataset
from stalempi.train.loss import count_correct, cross_entropy
from stalempi.train.models.resnet import cifar_resnet
from stalempi.train.sampler import DistributedSampler
from stalempi.train.schedule import StepDecay, Warmup

METHODS: tuple[stalempi.Schedule, ...] = (
    stalempi.BP(),
    stalempi.GPipe(4),
    stalempi.OneForwardOneBackward(4),
    stalempi.PipeDream(),
    stalempi.TwoBW(4),
    stalempi.DDG(),
    stalempi.FR(),
    stalempi.DNI(),
    stalempi.DSP((1, 1, 0), (4, 2, 0)),
    stalempi.DSP((2, 2, 0), (6, 3, 0)),
    stalempi.DSP((5, 5, 0), (14, 7, 0)),
)
SEEDS = (0, 1, 2)
CUTS = (4, 5)  # ResNet-8 has three residual blocks: each pipeline block gets one of them
EPOCHS, BATCH, LR, MOMENTUM, WEIGHT_DECAY = 12, 64, 0.02, 0.9, 5e-4
EVALUATIONS = 4  # in a run; each drains the pipe
TEST_BATCH = 500
HERE = Path(__file__).parent
Pairs = Sequence[tuple[Tensor, Tensor]]


class Learner(Protocol):
    """A pipeline, wherever it runs."""

    def step(self, x: Tensor, y: Tensor) -> object:
        """Lets a batch in."""

    def accuracy(self, batches: Pairs) -> float:
        """Returns the share of labels that it gets right, after a drain."""


class OneProcess:
    """The pipeline in one process."""

    def __init__(self, model: nn.Sequential, method: stalempi.Schedule, options: BlockOptions) -> None:
        modules = split(model, CUTS).modules
        self._blocks = Reference(modules, method, make_optimizer, cross_entropy, options=options)

    def step(self, x: Tensor, y: Tensor) -> None:
        self._blocks.step(x, y)

    def accuracy(self, batches: Pairs) -> float:
        self._blocks.drain()
        correct = sum(count_correct(self._blocks.evaluate(x), y) for x, y in batches)
        return correct / sum(len(y) for _, y in batches)


class OverMpi:
    """The pipeline with a block on each rank."""

    def __init__(self, model: nn.Sequential, method: stalempi.Schedule, options: BlockOptions) -> None:
        self._pipe = stalempi.Pipeline(
            model, optimizer=make_optimizer, loss=cross_entropy, method=method, split=CUTS, options=options
        )

    def step(self, x: Tensor, y: Tensor) -> None:
        self._pipe.step(x, y)

    def accuracy(self, batches: Pairs) -> float:
        return self._pipe.evaluate(batches)


Make = Callable[[nn.Sequential, stalempi.Schedule, BlockOptions], Learner]


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


@lru_cache(maxsize=1)
def load(folder: str, seed: int) -> Data:
    return load_dataset("imagefolder", data_dir=folder, seed=seed)


def train(make: Make, method: stalempi.Schedule, seed: int, *, folder: str, epochs: int) -> dict[str, Any]:
    """Trains once; the seed gives the first weights, the order of the samples and their augmentation."""
    torch.set_num_threads(1)
    data, began = load(folder, seed), time.process_time()
    torch.manual_seed(seed)
    model = cifar_resnet(8, data.num_classes, (3, 32, 32))
    samples = len(data.train) // BATCH * BATCH
    schedule = Warmup(samples) * StepDecay(epochs * samples)
    learner = make(model, method, BlockOptions(seed=seed, update=UpdateOptions(schedule=schedule)))
    order = DistributedSampler(len(data.train), num_workers=1, worker_rank=0, seed=seed)
    test = [data.test.batch(range(i, i + TEST_BATCH)) for i in range(0, len(data.test), TEST_BATCH)]
    curve: list[tuple[int, float]] = []
    diverged = False
    try:
        for epoch in range(epochs):
            indices = list(order)
            for start in range(0, samples, BATCH):
                learner.step(*data.train.batch(indices[start : start + BATCH], epoch=epoch))
            if epoch + 1 == epochs or (epoch + 1) % max(1, epochs // EVALUATIONS) == 0:
                curve.append((epoch + 1, learner.accuracy(test)))
    except NonFiniteError:
        diverged = True
    return {
        "method": str(method),
        "seed": seed,
        "epochs": epochs,
        "accuracy": None if diverged else curve[-1][1],
        "curve": curve,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def place(results: Path, method: stalempi.Schedule, seed: int) -> Path:
    return results / f"{re.sub('[^a-z0-9]+', '-', str(method)).strip('-')}_seed{seed}.json"


def run(folder: str, epochs: int, results: Path, job: tuple[stalempi.Schedule, int]) -> Path:
    """Makes one run and its file, which appears whole or not at all."""
    path = place(results, *job)
    result = train(OneProcess, *job, folder=folder, epochs=epochs)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def run_all(folder: str, epochs: int, results: Path, processes: int) -> None:
    results.mkdir(parents=True, exist_ok=True)
    jobs = [(method, seed) for seed in SEEDS for method in METHODS if not place(results, method, seed).exists()]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, folder, epochs, results, job) for job in jobs]):
            print(done.result().read_text(encoding="utf-8").strip(), file=sys.stderr, flush=True)


def print_table(results: Path) -> None:
    """Prints what there is."""
    stale = "staleness of blocks 0, 1, 2"
    print(f"| method | {stale} | test accuracy %, mean | lowest .. highest of the seeds |")
    print("| --- | ---: | ---: | ---: |")
    for method in METHODS:
        paths = [path for seed in SEEDS if (path := place(results, method, seed)).exists()]
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        good = [100 * found["accuracy"] for found in runs if found["accuracy"] is not None]
        cells = [f"{statistics.mean(good):.1f}", f"{min(good):.1f} .. {max(good):.1f}"] if good else ["-", "-"]
        missing = "" if len(good) == len(SEEDS) else f" ({len(good)} of {len(SEEDS)} seeds; {len(runs)} runs made)"
        staleness = ", ".join(str(method.staleness(k, 3)) for k in range(3))
        print(f"| `{method}` | {staleness} | {' | '.join(cells)}{missing} |")


def over_mpi(folder: str, epochs: int, results: Path, label: str) -> None:
    """Trains one method over MPI, seed 0, and says whether its accuracies are those of the run in one process."""
    method = {str(method): method for method in METHODS}[label]
    if not is_launched(os.environ):
        again = [sys.executable, "-m", "benchmarks.pipeline_accuracy.measure", *sys.argv[1:]]
        sys.exit(subprocess.run(launch_command(find_launcher(), 3, again), check=False).returncode)
    context = stalempi.init(pipeline=True)
    found = train(OverMpi, method, 0, folder=folder, epochs=epochs)
    if context.rank == 0:
        path = place(results, method, 0)
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        one = kept if kept and kept["epochs"] == epochs else train(OneProcess, method, 0, folder=folder, epochs=epochs)
        print(label, "over MPI", found["curve"], "in one process", one["curve"])
        print("equal" if [list(p) for p in found["curve"]] == [list(p) for p in one["curve"]] else "DIFFERENT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="ImageFolder tree: train/CLASS, test/CLASS")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--processes", type=int, default=2, help="one a core")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="one file a run")
    parser.add_argument("--table", action="store_true", help="only print the table of the runs there are")
    parser.add_argument("--mpi", metavar="METHOD", help="train this one over MPI, as in --mpi 'dsp(1,1,0;4,2,0)'")
    args = parser.parse_args()
    if args.mpi:
        over_mpi(args.folder, args.epochs, args.results, args.mpi)
        return
    if not args.table:
        run_all(args.folder, args.epochs, args.results, args.processes)
    print_table(args.results)


if __name__ == "__main__":
    main()
