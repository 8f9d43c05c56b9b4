"""Measures the memory that each rank needs by every pipeline method, beside the dry run's formula. Linux only.

python -m benchmarks.pipeline_memory.measure

Three ranks train a ResNet-8 on made-up images. Measured is the peak of resident memory (VmHWM, reset for each method)
minus the resident memory before the model is made. The C library is told to hand memory back to the system at once, and
a first run, which is not counted, pays for what is set up once; so what is left is what the method keeps, and what
computations need while they run.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import stalempi
from benchmarks.pipeline_accuracy.measure import CUTS, METHODS
from benchmarks.pipeline_speed.emulated import environment, run_under_mpi
from stalempi.bench.launch import is_launched
from stalempi.pipeline.dryrun import BlockCost, link_depths, play
from stalempi.pipeline.measure import measure
from stalempi.pipeline.split import split
from stalempi.train.models.resnet import cifar_resnet

BLOCKS, BATCH, SHAPE, CLASSES = 3, 128, (3, 32, 32), 10
LONG = 60.0
# large pieces of memory get pages of their own, which go back to the system once they are free
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Whole(nn.Module):
    """Hides a block's layers, so that `measure` takes the block as one unit."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y


@dataclass
class Memory:
    """What one rank needed: `peak` bytes of resident memory, and the most batches or micro-batches `held` at once."""

    peak: int
    held: int


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return cifar_resnet(8, CLASSES, SHAPE)


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)  # type: ignore[arg-type]


def resident(what: str) -> int:
    """Returns bytes: `what` is VmRSS, of now, or VmHWM, the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def forget_peak() -> None:
    """Frees what can be freed, and makes the memory of now the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def train(method: stalempi.Schedule) -> Memory:
    """Trains until all queues have been full for a while."""
    forget_peak()
    before = resident("VmRSS")
    pipe = stalempi.Pipeline(
        make_model(), optimizer=make_optimizer, loss=nn.functional.cross_entropy, method=method, split=CUTS
    )
    with pipe:
        for number in range(method.delay(0, BLOCKS) + 8):
            draws = torch.Generator().manual_seed(number)
            x = torch.randn(BATCH, *SHAPE, generator=draws) if pipe.is_first else None
            y = torch.randint(0, CLASSES, (BATCH,), generator=draws) if pipe.is_last else None
            pipe.step(x, y)
        held = pipe.stats.most_held
    return Memory(resident("VmHWM") - before, held)


def measure_blocks() -> list[BlockCost]:
    """Returns what a batch leaves in each block: bytes of its input, of its graph, of the weights."""
    x, found = torch.randn(BATCH, *SHAPE), []
    for module in split(make_model(), CUTS).modules:
        (cost,) = measure(nn.Sequential(Whole(module)), x, repeats=1)
        found.append(
            BlockCost(
                cost.forward, cost.recompute, cost.backward, 0.0, x.nbytes, cost.saved_bytes, cost.parameter_bytes
            )
        )
        with torch.no_grad():
            x = module(x)
    return found


def formula(method: stalempi.Schedule, costs: list[BlockCost]) -> tuple[list[int], list[int], list[int]]:
    """Returns for each block the bytes kept by the formula, those of messages at most, and the batches held."""
    run = play(method, BLOCKS, method.delay(0, BLOCKS) + 8, costs=costs)
    kept = [
        nbytes + 2 * cost.weight_bytes  # gradients and momentum
        for nbytes, cost in zip(run.peak_bytes(costs), costs, strict=True)
    ]
    links, depths = [0] * BLOCKS, link_depths(method, BLOCKS)
    for k, (up, down) in enumerate(depths):
        nbytes = (up + down) * costs[k + 1].input_bytes // method.micro_batches
        links[k] += nbytes
        links[k + 1] += nbytes
    held = [
        max(i, g) if method.keeps_graph(k, BLOCKS) else i
        for k, (i, g) in enumerate(zip(run.inputs, run.graphs, strict=True))
    ]
    return kept, links, held


def print_table(found: dict[str, list[Memory]], costs: list[BlockCost]) -> None:
    columns = [f"block {k}: {what}" for k in range(BLOCKS) for what in ("held", "formula", "links", "measured")]
    print(f"| method | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for method in METHODS:
        kept, links, held = formula(method, costs)
        cells = []
        for k, memory in enumerate(found[str(method)]):
            counted = str(memory.held) if memory.held == held[k] else f"{memory.held}, not {held[k]}"
            cells += [counted, *(f"{nbytes / 1e6:.1f}" for nbytes in (kept[k], links[k], memory.peak))]
        print(f"| `{method}` | {' | '.join(cells)} |")


def main() -> None:
    if not is_launched(os.environ):
        os.environ.update(ALLOCATOR)
        run_under_mpi("benchmarks.pipeline_memory.measure", BLOCKS, [])
        return
    context = stalempi.init(pipeline=True)
    torch.set_num_threads(1)
    where, costs, found = environment(), measure_blocks(), {}
    train(METHODS[0])
    for method in METHODS:
        told = context.transport.allgather(json.dumps(asdict(train(method))).encode(), LONG)
        found[str(method)] = [Memory(**json.loads(text)) for text in told]
        if context.rank == 0:
            print(method, *found[str(method)], file=sys.stderr, flush=True)
    if context.rank == 0:
        print("MB a rank, batch of 128 images.\n")
        print_table(found, costs)
        print("\n| | input of a batch | graph of a batch | weights |\n| --- | ---: | ---: | ---: |")
        for k, cost in enumerate(costs):
            sizes = (cost.input_bytes, cost.graph_bytes, cost.weight_bytes)
            print(f"| block {k} | {' | '.join(f'{nbytes / 1e6:.2f}' for nbytes in sizes)} |")
        print(f"\n{where}.")


if __name__ == "__main__":
    main()
