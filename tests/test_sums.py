"""A job computes what one process computes, and its books add up (laws 4 and 11); in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Decision, Drop, Event, Leave, Policy, Push
from stalempi.train.optimizer import DistributedOptimizer

from .job import run_job
from .small import data, fill, largest_difference, make_model, momentum, plain, step

torch.set_num_threads(1)

Make = Callable[[nn.Module], torch.optim.Optimizer]
Loop = Callable[[nn.Module, torch.optim.Optimizer], object]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *_, last = model.children()
    groups: list[dict[str, Any]] = [
        {"params": last.parameters()},
        {"params": first.parameters(), "lr": 0.02, "weight_decay": 0.1},
    ]
    return torch.optim.SGD(groups, lr=0.2, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("make", [momentum, adam, in_groups], ids=["momentum", "Adam", "groups"])
def test_bsp_equals_one_process_on_the_joined_batches(make: Make, workers: int) -> None:
    """Worker w has 1 + 2 w samples of every batch, so that a plain mean of gradients would be another result."""
    edges = [worker * worker for worker in range(workers + 1)]
    batches = [data(edges[-1], seed) for seed in range(8)]

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        mine = slice(edges[worker], edges[worker + 1])
        for x, y in batches:
            step(model, optimizer, x[mine], y[mine])

    job = run_job(make_model, make, BSP(), train, workers=workers)
    alone = make_model()
    optimizer = make(alone)
    for x, y in batches:
        step(alone, optimizer, x, y)
    assert largest_difference(make_model(), alone) > 0.01
    assert largest_difference(job.model, alone) < (2e-6 if make is not adam else 2e-5)
    assert job.stats.updates == len(batches)


@pytest.mark.parametrize("policy", [ASP(), SSP(0), BSP(), DSSP(1, 3)], ids=str)
@pytest.mark.parametrize("make", [momentum, adam, adamw, in_groups], ids=["momentum", "Adam", "AdamW", "groups"])
def test_one_worker_is_plain_torch_to_the_last_bit(make: Make, policy: Policy) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(6):
            step(model, optimizer, *data(5, number))

    job = run_job(make_model, make, policy, lambda m, o, _: loop(m, o), workers=1)
    alone = make_model()
    loop(alone, make(alone))
    assert largest_difference(job.model, alone) == 0.0
    assert largest_difference(job.workers[0], alone) == 0.0


def test_a_rate_that_a_worker_sets_for_one_group_takes_effect_in_that_group() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(6):
            optimizer.param_groups[1]["lr"] = 0.1 / (1 + number)
            step(model, optimizer, *data(5, number))

    job = run_job(make_model, in_groups, ASP(), lambda m, o, _: loop(m, o), workers=1)
    alone = make_model()
    loop(alone, in_groups(alone))
    assert largest_difference(job.model, alone) == 0.0


def test_a_schedule_and_a_workers_rate_multiply() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for rate in (0.5, 0.5, 0.25, 0.25):
            optimizer.param_groups[0]["lr"] = rate
            fill(model, 1.0)
            optimizer.step(samples=10)

    job = run_job(make_model, plain, ASP(), train, workers=1, schedule=lambda samples: 1.0 if samples < 20 else 0.5)
    gone = next(make_model().parameters()) - next(job.model.parameters())
    assert torch.allclose(gone, torch.full_like(gone, 0.5 + 0.5 + 0.125 + 0.125))


class TwoHeads(nn.Module):
    """Worker w uses head w, and head 2 is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads = nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])


def test_a_parameter_that_only_one_worker_touches_gets_that_gradient_by_its_share() -> None:
    """The others' samples count with a gradient of zero, as in one process; untouched ones do not even decay."""
    x, y = data(9)
    parts = [slice(0, 3), slice(3, 9)]

    def losses(model: nn.Module, worker: int) -> Tensor:
        heads = model.heads
        assert isinstance(heads, nn.ModuleList)
        out: Tensor = nn.functional.cross_entropy(heads[worker](x[parts[worker]]), y[parts[worker]], reduction="sum")
        return out

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(5):
            optimizer.zero_grad()
            samples = len(x[parts[worker]])
            (losses(model, worker) / samples).backward()
            optimizer.step(samples=samples)

    job = run_job(TwoHeads, momentum, BSP(), train, workers=2)
    alone = TwoHeads()
    optimizer = momentum(alone)
    for _ in range(5):
        optimizer.zero_grad()
        ((losses(alone, 0) + losses(alone, 1)) / 9).backward()
        optimizer.step()
    assert largest_difference(job.model, alone) < 1e-6
    assert torch.equal(list(job.model.parameters())[-1], list(TwoHeads().parameters())[-1])


def test_gradients_that_add_up_over_several_batches_count_all_their_samples() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        optimizer.zero_grad()
        for size in (3, 5):
            x, y = data(size)
            (nn.functional.cross_entropy(model(x), y, reduction="sum") / 8).backward()
        optimizer.step()

    job = run_job(make_model, plain, ASP(), train, workers=1)
    assert job.stats.samples == 8


def test_gradients_clipped_in_place_are_pushed_clipped() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(4):
            optimizer.zero_grad()
            x, y = data(6, number)
            (100 * nn.functional.cross_entropy(model(x), y)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    job = run_job(make_model, momentum, ASP(), lambda m, o, _: loop(m, o), workers=1)
    alone = make_model()
    loop(alone, momentum(alone))
    assert largest_difference(job.model, alone) == 0.0


def every_policy() -> list[Policy]:
    return [ASP(), BSP(), BSP(backup=1), SSP(1), CachedSSP(2), DSSP(1, 4)]


@pytest.mark.parametrize("policy", every_policy(), ids=str)
def test_every_push_is_applied_once_or_dropped_and_counted(policy: Policy) -> None:
    """Gradients are ones, so that the weights say how many updates were made (law 4)."""
    pushes, leaves = [0, 0, 0], [0, 0, 0]

    def observe(event: Event, decisions: list[Decision]) -> None:
        del decisions
        counts = pushes if isinstance(event, Push) else leaves
        assert isinstance(event, (Push, Leave))
        counts[event.worker] += 1

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(6 + 3 * worker):
            fill(model, 1.0)
            optimizer.step(samples=1 + worker)

    job = run_job(make_model, plain, policy, train, workers=3, observe=observe)
    stats = job.stats
    assert leaves == [1, 1, 1]
    assert pushes == [worker.iterations for worker in stats.workers] == [6, 9, 12]
    for number, worker in enumerate(stats.workers):
        assert worker.applied + worker.dropped == worker.iterations
        assert worker.samples == worker.applied * (1 + number)
    assert stats.samples == sum(worker.samples for worker in stats.workers)
    gone = next(make_model().parameters()) - next(job.model.parameters())
    assert torch.allclose(gone, torch.full_like(gone, 0.5 * stats.updates), atol=1e-4)
    if not isinstance(policy, BSP):
        assert stats.updates == sum(pushes)


def test_bsp_with_a_backup_drops_the_gradient_of_the_worker_that_is_late() -> None:
    """Workers 0 and 1 complete the round; the gradient that worker 2 still computed for it counts nowhere."""
    pushed = [0]
    round_over, late = threading.Event(), threading.Event()

    def observe(event: Event, decisions: list[Decision]) -> None:
        pushed[0] += isinstance(event, Push)
        if pushed[0] == 2:
            round_over.set()
        if any(isinstance(decision, Drop) for decision in decisions):
            late.set()

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        if worker == 2:
            assert round_over.wait(10)
        fill(model, 100.0 if worker == 2 else 1.0)
        optimizer.step(samples=4)
        if worker != 2:
            assert late.wait(10)
            return
        before = make_model()
        gone = next(before.parameters()) - next(model.parameters())
        assert torch.allclose(gone, torch.full_like(gone, 0.5))  # it joins with the parameters of the round it missed

    job = run_job(make_model, plain, BSP(backup=1), train, workers=3, observe=observe)
    assert [worker.dropped for worker in job.stats.workers] == [0, 0, 1]
    assert [worker.samples for worker in job.stats.workers] == [4, 4, 0]
    assert (job.stats.samples, job.stats.updates) == (8, 1)
    gone = next(make_model().parameters()) - next(job.model.parameters())
    assert torch.allclose(gone, torch.full_like(gone, 0.5))


def test_the_loop_ends_at_the_samples_asked_for_under_every_policy() -> None:
    """Each worker may have one more push on its way when enough samples are in, not more."""
    for policy in every_policy():

        def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
            while not optimizer.done:
                fill(model, 0.01)
                optimizer.step(samples=5)
            assert optimizer.global_samples >= 100

        job = run_job(make_model, plain, policy, train, workers=3, total_samples=100)
        assert 100 <= job.stats.samples <= 100 + 3 * 5, str(policy)
