"""Measures how much one random slow block in each step slows the methods down, beside what the dry run says.

python -m benchmarks.pipeline_straggler.measure          (or with --blocks 3, or 4, alone)

Emulated blocks of equal cost, on real ranks. In each step one block, drawn at random, takes 20, 50 or 100% longer for
all that it does in that step: the same draws for every method, and for the dry run. Only ratios of one method's times
in one job count.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

import stalempi
from benchmarks.pipeline_speed.emulated import WIDTH, environment, measure_period, run_under_mpi, sleep_until
from stalempi.bench.launch import is_launched
from stalempi.pipeline.actions import Op
from stalempi.pipeline.dryrun import BlockCost, Slow, play
from stalempi.pipeline.runner import Stretch

COST = BlockCost(forward=0.008, recompute=0.008, backward=0.016)
SECONDS = {Op.FORWARD: COST.forward, Op.RECOMPUTE: COST.recompute, Op.BACKWARD: COST.backward}
LONGER = (0.2, 0.5, 1.0)
STEADY = 120  # steps that are timed, of the methods whose blocks drift apart
MANY = 2000

QUEUES: dict[int, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    3: {"short": ((1, 1, 0), (4, 2, 0)), "middle": ((2, 2, 0), (6, 3, 0)), "long": ((5, 5, 0), (14, 7, 0))},
    4: {
        "short": ((1, 1, 1, 0), (6, 4, 2, 0)),
        "middle": ((2, 2, 2, 0), (12, 8, 4, 0)),
        "long": ((5, 5, 5, 0), (30, 20, 10, 0)),
    },
}


def methods(blocks: int) -> dict[str, stalempi.Schedule]:
    dsp = {name: stalempi.DSP(p, m) for name, (p, m) in QUEUES[blocks].items()}
    return {
        "bp": stalempi.BP(),
        "gpipe(4)": stalempi.GPipe(4),
        "fr": stalempi.FR(),
        **{f"{method}: {name} queues": method for name, method in dsp.items()},
    }


def batches_of(method: stalempi.Schedule, blocks: int) -> int:
    """Returns how many batches are run: the later half is timed, and not the drain.

    The synchronous methods wait for the slow block in each step, so that few steps show what it costs.
    """
    delay = method.delay(0, blocks)
    return 2 * STEADY + delay if delay else 24


def slow_steps(blocks: int, longer: float) -> Slow:
    draws = random.Random(0)
    picked = [draws.randrange(blocks) for _ in range(MANY)]
    return lambda block, step: 1 + longer * (picked[step] == block)


def stretch_of(method: stalempi.Schedule, block: int, slow: Slow) -> Stretch:
    """Makes computations take what `COST` says, in a step of a slow block longer."""

    def stretch(op: Op, step: int, began: float) -> None:
        if op in SECONDS:
            sleep_until(began + SECONDS[op] / method.micro_batches * slow(block, step))

    return stretch


def predict(method: stalempi.Schedule, blocks: int, batches: int, slow: Slow) -> float:
    return play(method, blocks, batches, costs=[COST] * blocks, slow=slow).period


def measure(method: stalempi.Schedule, context: stalempi.Context, slow: Slow) -> float:
    units = [nn.Linear(WIDTH, WIDTH) for _ in range(context.size)]
    stretch = stretch_of(method, context.rank, slow)
    return measure_period(units, method, batches_of(method, context.size), stretch)


def slow_downs(run: Callable[[Slow], float], blocks: int) -> tuple[float, list[float]]:
    """Returns seconds a batch without a slow block, and the share that each of LONGER adds."""
    alone = run(slow_steps(blocks, 0.0))
    return alone, [run(slow_steps(blocks, longer)) / alone - 1 for longer in LONGER]


def percent(shares: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in shares)


def measure_all(context: stalempi.Context) -> None:
    blocks = context.size
    where, found = environment(), {}
    for name, method in methods(blocks).items():
        found[name] = slow_downs(partial(measure, method, context), blocks)
        if context.rank == 0:
            print(f"K={blocks} {name}: {percent(found[name][1])}", file=sys.stderr, flush=True)
    if context.rank == 0:
        print_table(found, blocks)
        print(f"\n{where}.\n", flush=True)


def print_table(found: dict[str, tuple[float, list[float]]], blocks: int) -> None:
    print(f"K = {blocks}\n")
    print(f"| method | ms a batch, no block slow | measured | dry run, same steps | dry run, {MANY:,} steps |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, method in methods(blocks).items():
        alone, measured = found[name]
        counts = (batches_of(method, blocks), MANY)
        played = [percent(slow_downs(partial(predict, method, blocks, count), blocks)[1]) for count in counts]
        print(f"| `{name}` | {1e3 * alone:.1f} | {percent(measured)} | {' | '.join(played)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, choices=QUEUES, nargs="+", default=list(QUEUES))
    args = parser.parse_args()
    if not is_launched(os.environ):
        print("Slower by % when one random block in each step takes 20 / 50 / 100% longer.\n", flush=True)
        for blocks in args.blocks:
            run_under_mpi("benchmarks.pipeline_straggler.measure", blocks, [])
        return
    torch.set_num_threads(1)
    measure_all(stalempi.init(pipeline=True))


if __name__ == "__main__":
    main()
