"""Plays the setting of the DSSP paper's Table I on real CIFAR-10 images, with two learning-rate schedules.

python -m benchmarks.dssp_table1.dssp_table1 FOLDER, an ImageFolder tree (train/CLASS, test/CLASS).

Two workers, 1 : 1.9 for good, s_L = 3, s_U = 15, each with half of the images and as many epochs of its own half as the
other. Real gradients under the virtual clock, so that the two cores of the machine do not matter. One schedule counts
global samples (law 11). The other goes by the epochs of the fastest worker, the paper's likely one (papers.md 1.6).
"""

from __future__ import annotations

import statistics
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from benchmarks.dssp_compare.dssp_compare import figure_2
from stalempi.policy import Decision, Event, Policy, Push
from stalempi.simulate.figures import Figures
from stalempi.simulate.learning import Learned, RateBy, Recipe, learn
from stalempi.simulate.scenarios import find_scenario
from stalempi.simulate.sweep import parse_policy
from stalempi.simulate.timing import Limit, simulate
from stalempi.simulate.workload import Workload
from stalempi.train.datasets import load_dataset

POLICIES = {
    "BSP": "bsp",
    "ASP": "asp",
    "SSP s=3": "ssp:3",
    "SSP s=6": "ssp:6",
    "SSP s=15": "ssp:15",
    "DSSP paper, by Figure 2 (uncapped)": "figure-2",
    "DSSP paper, Algorithms 1 and 2 (uncapped)": "dssp:3:15:paper",
    "DSSP paper-capped": "dssp:3:15:paper-capped",
    "DSSP dyn": "dssp:3:15",
}
EPOCHS, BATCH, SEEDS = 6, 64, (0,)
TARGETS = (0.38, 0.40)
SCHEDULES: dict[RateBy, str] = {"samples": "by global samples", "fastest": "by the fastest worker's own epochs"}


def make_policy(label: str) -> Policy:
    return figure_2() if label == "figure-2" else parse_policy(label)


def limited(workload: Workload, iterations: int) -> Workload:
    """Lets every worker leave after so many iterations: its own epochs."""
    left = [iterations] * workload.num_workers

    def compute(worker: int, now: float) -> float | None:
        left[worker] -= 1
        return workload.compute(worker, now) if left[worker] >= 0 else None

    return replace(workload, compute=compute)


def run(folder: str, rate_by: RateBy, job: tuple[str, int]) -> Learned:
    label, seed = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    data = load_dataset("imagefolder", data_dir=folder, seed=seed)
    samples = EPOCHS * len(data.train)
    recipe = Recipe(data, samples=10 * samples, batch_size=BATCH, lr=0.02, momentum=0.5, evaluate_every=samples // 30)
    # The run ends when the workers have had their epochs; the schedule is laid out over those.
    decay = tuple(share / 10 for share in (2 / 3, 5 / 6))
    recipe = replace(recipe, decay=decay, rate_by=rate_by)
    pair = find_scenario("pair").workload(2, seed=seed, horizon=1e6, unit=0.1)
    return learn(make_policy(label), limited(pair, samples // (2 * BATCH)), recipe, seed=seed)


def cell(results: list[Learned], target: float) -> str:
    reached = [point.seconds for result in results if (point := result.reached(target))]
    if not reached:
        return "-"
    return f"{statistics.mean(reached):.0f}" + (
        "" if len(reached) == len(results) else f" ({len(reached)} of {len(results)})"
    )


def first_decay(label: str, rate_by: RateBy) -> tuple[float, float]:
    """Returns when the rate is first divided, and when the run ends (s), in the paper's own size: timing only.

    300 epochs of 25,000 images a worker in batches of 128; an iteration of the slow worker takes what makes the run as
    long as the paper's, about 8,950 s.
    """
    iterations = 300 * 25_000 // 128
    due, policy, found = 2 * iterations * 2 / 3, make_policy(label), [0.0]
    pushes = [0]

    def observe(event: Event, decisions: list[Decision]) -> None:
        del decisions
        pushes[0] += isinstance(event, Push)
        reached = pushes[0] if rate_by == "samples" else 2 * policy.clocks.most
        if not found[0] and reached >= due:
            found[0] = event.now

    pair = find_scenario("pair").workload(2, seed=0, horizon=1e6, unit=8950 / iterations / 1.9)
    stats = simulate(policy, limited(pair, iterations), limit=Limit(), observe=observe)
    return found[0], stats.seconds


def print_decays() -> None:
    print("| policy | first decay by global samples, s | by the fastest worker's epochs, s | s in all |")
    print("| --- | ---: | ---: | ---: |")
    for name, label in POLICIES.items():
        (by_samples, seconds), (by_fastest, _) = (first_decay(label, rate_by) for rate_by in SCHEDULES)
        print(f"| {name} | {by_samples:.0f} | {by_fastest:.0f} | {seconds:.0f} |", flush=True)


def main() -> None:
    warnings.simplefilter("ignore", UserWarning)
    print_decays()
    folder = sys.argv[1]
    for rate_by, title in SCHEDULES.items():
        print(f"\nLearning rate {title}\n")
        print(f"| policy | {' | '.join(f's to {t:.2f}' for t in TARGETS)} | s in all | best accuracy | largest gap |")
        print("| --- |" + " ---: |" * (len(TARGETS) + 3))
        jobs = [(label, seed) for label in POLICIES.values() for seed in SEEDS]
        with ProcessPoolExecutor(2) as pool:
            results = list(pool.map(partial(run, folder, rate_by), jobs))
        for place, name in enumerate(POLICIES):
            mine = results[place * len(SEEDS) : (place + 1) * len(SEEDS)]
            figures = [Figures.of(result.stats) for result in mine]
            best = statistics.mean(max(point.accuracy for point in result.curve) for result in mine)
            seconds, gap = statistics.mean(f.seconds for f in figures), max(f.gap_max for f in figures)
            cells = " | ".join(cell(mine, target) for target in TARGETS)
            print(f"| {name} | {cells} | {seconds:.0f} | {best:.3f} | {gap} |", flush=True)


if __name__ == "__main__":
    main()
