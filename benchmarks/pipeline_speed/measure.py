"""Measures what a batch takes by every pipeline method, and by torch's own schedules, on emulated blocks of equal cost.

python -m benchmarks.pipeline_speed.measure

Four ranks, a block on each that takes F = R = 20 ms and B = 40 ms for a batch (it sleeps). All methods run in the same
job, in rounds that alternate, so that all see the same machine; the shortest of its rounds counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import stalempi
from benchmarks.pipeline_speed.emulated import EmulatedBlock, environment, measure_period, run_under_mpi
from benchmarks.pipeline_speed.torch_schedules import SCHEDULES, measure_torch
from stalempi.bench.launch import is_launched
from stalempi.pipeline.dryrun import BlockCost, play

BLOCKS = 4
F = R = 0.020
B = 0.040
SHORT, MIDDLE, LONG = ((1, 1, 1, 0), (6, 4, 2, 0)), ((2, 2, 2, 0), (12, 8, 4, 0)), ((5, 5, 5, 0), (30, 20, 10, 0))
HIDDEN, IN_LINE = "dsp(1,1,1,0;6,4,2,0)", "dsp(1,1,1,0;6,4,2,0), recompute in line"
METHODS: dict[str, stalempi.Schedule] = {
    **{
        str(method): method
        for method in (
            stalempi.BP(),
            stalempi.GPipe(4),
            stalempi.GPipe(8),
            stalempi.OneForwardOneBackward(4),
            stalempi.OneForwardOneBackward(8),
            stalempi.PipeDream(),
            stalempi.TwoBW(4),
            stalempi.DDG(),
            stalempi.FR(),
            stalempi.DNI(),
            stalempi.DSP(*SHORT),
            stalempi.DSP(*MIDDLE),
            stalempi.DSP(*LONG),
        )
    },
    "fr, recompute in line": stalempi.FR(overlaps=False),
    IN_LINE: stalempi.DSP(*SHORT, overlaps=False),
}
TORCH = [(name, parts) for parts in (4, 8) for name in SCHEDULES]


def batches_of(method: stalempi.Schedule) -> int:
    """Returns how many batches fill the pipe and leave at least 15 to be timed; few of the slow ones."""
    return (2 * method.delay(0, BLOCKS) + 40) if method.delay(0, BLOCKS) or method.predicts else 20


def predict(method: stalempi.Schedule) -> float:
    costs = [BlockCost(forward=F, recompute=R, backward=B)] * BLOCKS
    return play(method, BLOCKS, batches_of(method), costs=costs).period


def measure_all(store: Path, rounds: int, context: stalempi.Context) -> dict[str, float]:
    """Returns seconds a batch of each method: of its shortest round."""
    make = partial(EmulatedBlock, F, B)
    found: dict[str, list[float]] = {}

    def note(name: str, run: Callable[[], float]) -> None:
        found.setdefault(name, []).append(run())
        if context.rank == 0:
            print(f"{name}: {1e3 * found[name][-1]:.1f} ms", file=sys.stderr, flush=True)

    for number in range(rounds):
        for name, method in METHODS.items():
            units = [make() for _ in range(BLOCKS)]
            note(name, partial(measure_period, units, method, batches_of(method)))
        for name, parts in TORCH:
            file = store / f"{name}-{parts}-{number}"
            run = partial(measure_torch, name, parts, make, 20, store=file, rank=context.rank, size=BLOCKS)
            note(f"torch {name}({parts})", run)
    return {name: min(times) for name, times in found.items()}


def print_table(found: dict[str, float]) -> None:
    print("| method | ms a batch | in units of F + B | the dry run | measured / dry run | times as fast as bp |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, seconds in found.items():
        method = METHODS.get(name)
        played = predict(method) if method else None
        beside = [f"{1e3 * played:.1f}", f"{seconds / played:.3f}"] if played else ["", ""]
        cells = [f"{1e3 * seconds:.1f}", f"{seconds / (F + B):.3f}", *beside, f"{found['bp'] / seconds:.2f}"]
        print(f"| `{name}` | {' | '.join(cells)} |" if method else f"| {name} | {' | '.join(cells)} |")


def print_verdicts(found: dict[str, float]) -> None:
    """Prints each thing that has to hold (issue 6), with the figure."""
    best = min(seconds for name, seconds in found.items() if name.startswith("torch"))
    hidden, in_line = found[HIDDEN], found[IN_LINE]
    rows = {
        "recompute hidden: at most 1.05 (F + B)": (hidden / (F + B), hidden <= 1.05 * (F + B)),
        "recompute in line: at most 1.05 (F + R + B)": (in_line / (F + R + B), in_line <= 1.05 * (F + R + B)),
        "at least 3.8 times as fast as bp": (found["bp"] / hidden, found["bp"] >= 3.8 * hidden),
        "at least 1.5 times as fast as the best of torch's": (best / hidden, best >= 1.5 * hidden),
    }
    print("\n| what `dsp(1,1,1,0;6,4,2,0)` must hold | measured | |\n| --- | ---: | --- |")
    for text, (value, holds) in rows.items():
        print(f"| {text} | {value:.3f} | {'yes' if holds else 'NO'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not is_launched(os.environ):
        with tempfile.TemporaryDirectory() as store:
            words = ["--rounds", str(args.rounds), "--store", store]
            run_under_mpi("benchmarks.pipeline_speed.measure", BLOCKS, words)
        return
    torch.set_num_threads(1)
    context = stalempi.init(pipeline=True)
    where = environment()
    found = measure_all(args.store, args.rounds, context)
    if context.rank == 0:
        print_table(found)
        print_verdicts(found)
        print(f"\n{where}; {args.rounds} rounds.")


if __name__ == "__main__":
    main()
