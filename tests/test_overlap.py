"""Gradients that leave during backward, and workers that run ahead, change when bytes move and not what is computed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stalempi.errors import ConfigError
from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Decision, Event, Policy
from stalempi.trace import Recorder, read_trace, replay
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.worker import OVERLAPS, Worker

from .job import Job, run_job
from .small import data, largest_difference, make_model, momentum, step

torch.set_num_threads(1)
SMALL = 64  # bytes of a bucket: every tensor of the model is one or more


def job(
    train: Callable[[nn.Module, DistributedOptimizer, int], object], policy: Policy, workers: int = 1, **options: Any
) -> Job:
    return run_job(make_model, momentum, policy, train, workers=workers, bucket_bytes=SMALL, **options)


def handed(optimizer: DistributedOptimizer) -> int:
    worker = optimizer._worker
    assert isinstance(worker, Worker)
    return worker.shares[0].buckets.handed


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    x, y = data(5, number)
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def two_backwards(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    for part in range(2):
        x, y = data(5, 10 * number + part)
        (nn.functional.cross_entropy(model(x), y) / 2).backward()
    optimizer.step()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    step(model, optimizer, *data(5, number))


@pytest.mark.parametrize("one_step", [plain_step, clipped_step, two_backwards])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_one_worker_is_plain_torch_to_the_last_bit_however_gradients_travel(
    overlap: str, one_step: Callable[[nn.Module, torch.optim.Optimizer, int], None]
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(6):
            one_step(model, optimizer, number)

    done = job(lambda m, o, _: loop(m, o), ASP(), overlap=overlap)
    alone = make_model()
    loop(alone, momentum(alone))
    assert largest_difference(done.model, alone) == 0.0
    early = one_step is plain_step and overlap != "off"
    assert done.stats.workers[0].report()["hidden_share"] == pytest.approx(5 / 6 if early else 0.0)


def test_buckets_leave_during_backward_from_the_second_step_on() -> None:
    seen = []

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(3):
            optimizer.zero_grad()
            x, y = data(5, number)
            nn.functional.cross_entropy(model(x), y).backward()
            seen.append(handed(optimizer))
            optimizer.step()

    job(train, BSP())
    assert seen[0] == 0
    assert seen[1] == seen[2] > 1


def test_under_bsp_the_sum_is_the_same_with_and_without_early_buckets() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(6):
            plain_step(model, optimizer, 10 * number + worker)

    early, late = (job(train, BSP(), workers=3, overlap=overlap) for overlap in ("hooks", "off"))
    assert largest_difference(early.model, late.model) == 0.0
    assert largest_difference(early.model, make_model()) > 0.01


@pytest.mark.parametrize("one_step", [clipped_step, two_backwards])
def test_a_gradient_that_changes_once_it_has_left_is_refused(
    one_step: Callable[[nn.Module, torch.optim.Optimizer, int], None],
) -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        plain_step(model, optimizer, 0)
        one_step(model, optimizer, 1)

    with pytest.raises(ConfigError, match="overlap='off'"):
        job(train, ASP())


def test_a_step_that_is_left_out_once_its_gradient_has_left_is_refused() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        plain_step(model, optimizer, 0)
        x, y = data(5, 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        assert isinstance(optimizer._worker, Worker)
        optimizer._worker.skip()

    with pytest.raises(ConfigError, match="left out"):
        job(train, ASP())


@pytest.mark.parametrize("group", [1, 2])
def test_whoever_leaves_in_the_middle_of_a_push_takes_it_back(group: int) -> None:
    """A backward without a step, as before a break or an exception: no part of it counts, and nobody waits."""
    handed_at_leave = []

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(4):
            plain_step(model, optimizer, 10 * number + worker)
        optimizer.zero_grad()
        x, y = data(5, 99)
        nn.functional.cross_entropy(model(x), y).backward()
        handed_at_leave.append(handed(optimizer))

    done = job(train, BSP(), workers=2, group=group)
    assert max(handed_at_leave) > 1
    assert done.stats.updates == 4
    assert [worker.applied for worker in done.stats.workers] == [4, 4]


def test_a_nan_in_a_bucket_that_has_left_is_noticed() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(4):
            x, y = data(5, number)
            step(model, optimizer, x * (float("nan") if number == 2 else 1.0), y)

    done = job(train, ASP(), nonfinite="skip")
    assert (done.stats.workers[0].nonfinite, done.stats.updates) == (1, 3)


def test_who_runs_ahead_computes_on_the_parameters_of_the_push_before() -> None:
    """Step t is computed on what the updates up to t - 2 have made, bit for bit; the last release is taken in."""
    steps = 7

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(steps):
            plain_step(model, optimizer, number)

    done = job(train, SSP(1), run_ahead=True)
    server, computes = make_model(), make_model()
    optimizer = momentum(server)
    gradients: list[list[torch.Tensor]] = []
    for number in range(steps):
        computes.zero_grad()
        x, y = data(5, number)
        nn.functional.cross_entropy(computes(x), y).backward()
        if number:  # the release of the push before has come
            computes.load_state_dict(server.state_dict())
        for mine, theirs in zip(server.parameters(), computes.parameters(), strict=True):
            assert theirs.grad is not None
            mine.grad = theirs.grad.clone()
        gradients.append([p.grad for p in server.parameters() if p.grad is not None])
        optimizer.step()
    assert largest_difference(done.model, server) == 0.0
    assert largest_difference(done.workers[0], server) == 0.0
    worker = done.stats.workers[0]
    assert (worker.iterations, worker.staleness_sum, worker.staleness_max) == (steps, steps - 1, 1)


def test_running_statistics_are_those_of_the_step_that_was_pushed() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(5):
            plain_step(model, optimizer, number)

    done = run_job(make, momentum, SSP(1), train, workers=1, run_ahead=True)
    buffers = zip(done.model.buffers(), done.workers[0].buffers(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in buffers)
    assert dict(done.model.named_buffers())["1.num_batches_tracked"] == 5


@pytest.mark.parametrize("policy", [SSP(1), SSP(2), DSSP(1, 3)], ids=str)
def test_no_worker_that_runs_ahead_starts_an_iteration_beyond_the_bound(policy: Policy, tmp_path: Path) -> None:
    bound = policy.bound
    assert bound is not None
    lock, farthest = threading.Lock(), [0]

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        draws = random.Random(worker)
        for number in range(25):
            with lock:  # it starts iteration `number`, having pushed so many
                least = policy.clocks.least if hasattr(policy, "clocks") else 0  # the server may not have begun
                farthest[0] = max(farthest[0], number - least)
            time.sleep(draws.choice([0.0, 0.001, 0.004]) * (1 + 2 * worker))
            plain_step(model, optimizer, 100 * worker + number)

    file = tmp_path / "trace"
    with Recorder(file, policy, started=lambda: 0.0) as recorder:

        def observe(event: Event, decisions: list[Decision]) -> None:
            recorder(event, decisions)

        done = job(train, policy, workers=3, run_ahead=True, observe=observe)
    assert 1 <= farthest[0] <= bound
    assert max(worker.gap_max for worker in done.stats.workers) <= bound
    assert sum(worker.applied for worker in done.stats.workers) == done.stats.updates == 75
    trace = read_trace(file)
    if isinstance(policy, SSP):  # a DSSP controller measures times from the start, which here is another clock's
        assert trace.start.options["run_ahead"] == 1
        assert replay(trace) == []


def test_who_is_told_to_stop_has_pushed_once_more_and_nothing_is_lost() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> int:
        number = 0
        while not optimizer.done:
            plain_step(model, optimizer, number)
            number += 1
        return number

    done = job(train, ASP(), run_ahead=True, total_samples=25)
    worker = done.stats.workers[0]
    assert worker.applied == worker.iterations == done.stats.updates == 6
    assert done.stats.samples == 30


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (BSP(), "waits for each release"),
        (SSP(0), "s >= 1"),
        (DSSP(0, 4), "s >= 1"),
        (CachedSSP(3), "waits for each release"),
        (DSSP(1, 4, controller="paper"), "take dyn"),
    ],
    ids=str,
)
def test_run_ahead_needs_room_in_the_bound(policy: Policy, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job(lambda *_: None, policy, run_ahead=True)
    assert policy.run_ahead == 0


def test_run_ahead_and_groups_and_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="leader"):
        job(lambda *_: None, ASP(), run_ahead=True, group=2)
    with pytest.raises(ConfigError, match="thread, hooks, off"):
        job(lambda *_: None, ASP(), overlap="always")
