"""A worker of the command computes what one process computes, and data is fetched by one rank at a time."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from stalempi.bench.data import load_in_turn
from stalempi.bench.steps import Stepper, grouped
from stalempi.policy import BSP
from stalempi.train.data import Data
from stalempi.train.datasets import load_dataset
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport.inproc import InprocTransport, run_ranks
from tests.job import make_context, run_job
from tests.small import data, largest_difference, make_model, momentum, step

CPU = torch.device("cpu")


def test_groups_are_of_the_size_asked_for_and_lose_nothing() -> None:
    assert list(grouped(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_several_uneven_batches_in_a_push_are_one_batch_of_one_process() -> None:
    parts = [slice(0, 4), slice(4, 5), slice(5, 8), slice(8, 10)]

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        stepper = Stepper(model, optimizer, "off", CPU)
        for number in range(5):
            x, y = data(10, number)
            mine = parts[2 * worker : 2 * worker + 2]
            assert stepper.compute([(x[part], y[part]) for part in mine]) == 5
            stepper.push()

    job = run_job(make_model, momentum, BSP(), train, workers=2)
    alone = make_model()
    optimizer = momentum(alone)
    for number in range(5):
        step(alone, optimizer, *data(10, number))
    assert largest_difference(job.model, alone) < 2e-6
    assert job.stats.samples == 50


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_low_precision_trains_about_as_full_precision_does(amp: str) -> None:
    """One batch is beyond what fp16 can hold: its gradient is not finite, and the step is skipped."""

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        stepper = Stepper(model, optimizer, amp, CPU)
        for number in range(8):
            x, y = data(10, number)
            stepper.compute([(1e6 * x if number == 3 and amp == "fp16" else x, y)])
            stepper.push()

    job = run_job(make_model, momentum, BSP(), train, workers=1)
    alone = make_model()
    optimizer = momentum(alone)
    for number in range(8):
        if not (number == 3 and amp == "fp16"):
            step(alone, optimizer, *data(10, number))
    worker = job.stats.workers[0]
    assert worker.applied + worker.skipped == 8
    assert worker.skipped == (1 if amp == "fp16" else 0)
    assert 0 < largest_difference(job.model, alone) < 0.05


def test_one_rank_of_a_node_downloads_and_rank_0_comes_first() -> None:
    """Ranks 0 and 1 are on one node, 2 and 3 on another."""
    calls: list[tuple[int, bool]] = []
    lock = threading.Lock()
    digits = load_dataset("digits")

    def main(transport: InprocTransport) -> None:
        context = replace(make_context(transport), local_rank=transport.rank % 2)

        def load(download: bool) -> Data:
            with lock:
                calls.append((transport.rank, download))
            return digits

        assert load_in_turn(load, context, download=True) is digits
        assert load_in_turn(load, context, download=False) is digits

    run_ranks(main, 4)
    assert calls[:2] == [(0, True), (2, True)]
    assert {(1, False), (3, False)} <= set(calls[2:])
    assert sorted(calls[2:]) == [(0, False), (1, False), (1, False), (2, False), (3, False), (3, False)]
