"""What the server counts and combines is what it says: gap, staleness, losses, running statistics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor, nn

from stalempi.policy import ASP, BSP, Decision, Event, Push
from stalempi.train.evaluate import evaluate
from stalempi.train.images import Scale, TensorImages
from stalempi.train.optimizer import DistributedOptimizer

from .job import Job, run_job
from .small import data, fill, make_model, plain, step

torch.set_num_threads(1)


def in_turn(order: list[int]) -> Callable[[int], AbstractContextManager[None]]:
    """Returns a lock that lets the workers in one at a time, in this order."""
    condition, rest = threading.Condition(), list(order)

    @contextmanager
    def turn(worker: int) -> Iterator[None]:
        with condition:
            assert condition.wait_for(lambda: rest[0] == worker, 20)
            yield
            rest.pop(0)
            condition.notify_all()

    return turn


def test_gaps_and_staleness_of_a_history_are_those_counted_by_hand() -> None:
    """Under ASP a worker is released at once; its gradient is as stale as the other's updates since then.

    push of     0   0   1   0   1   1
    clocks     1 0 2 0 2 1 3 1 3 2 3 3
    gap         1   2   0   2   0   0
    staleness   0   0   2   1   1   0
    """
    order = [0, 0, 1, 0, 1, 1]
    turn = in_turn(order)
    history: list[int] = []

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(3):
            with turn(worker):
                fill(model, 1.0)
                optimizer.step(samples=1)

    def observe(event: Event, decisions: list[Decision]) -> None:
        del decisions
        if isinstance(event, Push):
            history.append(event.worker)

    first, second = run_job(make_model, plain, ASP(), train, workers=2, observe=observe).stats.workers
    assert history == order
    assert (first.gap_sum, first.gap_max, first.staleness_sum, first.staleness_max) == (5, 2, 1, 1)
    assert (second.gap_sum, second.gap_max, second.staleness_sum, second.staleness_max) == (0, 0, 3, 2)
    assert first.report()["gap_mean"] == pytest.approx(5 / 3)
    assert second.report()["staleness_mean"] == pytest.approx(1.0)


def test_the_loss_shown_is_a_running_mean_of_those_reported() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for loss in (4.0, 2.0, 2.0):
            fill(model, 0.0)
            optimizer.step(samples=1, loss=loss)
        fill(model, 0.0)
        optimizer.step(samples=1)  # without a loss, which leaves the mean as it is

    job = run_job(make_model, plain, ASP(), train, workers=1)
    k = 0.95
    assert job.stats.loss == pytest.approx((k * k * 4.0 + k * 2.0 + 2.0) / (k * k + k + 1))


def test_waiting_and_speed_are_shares_of_the_time_that_the_server_saw() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(3):
            if worker == 1:
                threading.Event().wait(0.1)
            fill(model, 1.0)
            optimizer.step(samples=7)

    fast, slow = (worker.report() for worker in run_job(make_model, plain, BSP(), train, workers=2).stats.workers)
    assert fast["wait_share"] > 0.5  # it has nothing to do but to wait
    assert slow["wait_share"] < 0.3
    assert 0 < slow["samples_per_second"] <= 70  # 7 in each tenth of a second, at most


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x.flatten(1)))
        return out


def normed_job() -> Job:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(30):
            x, y = data(20, 2 * number + worker)
            step(model, optimizer, 5.0 + 2.0 * x, y)

    return run_job(Normed, lambda m: torch.optim.SGD(m.parameters(), lr=0.05), BSP(), train, workers=2)


def test_the_servers_model_evaluates_with_the_statistics_of_all_workers() -> None:
    """The server itself has run no batch: with the statistics of a fresh BatchNorm it would be far off."""
    model = normed_job().model
    norm = model.norm
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert torch.allclose(norm.running_mean, torch.full((4,), 5.0), atol=0.5)
    assert torch.allclose(norm.running_var, torch.full((4,), 4.0), atol=1.0)
    assert int(norm.num_batches_tracked or 0) == 30
    x, _ = data(400, 99)
    model.train()
    by_batch = model(5.0 + 2.0 * x)
    model.eval()
    assert torch.allclose(model(5.0 + 2.0 * x), by_batch, atol=0.35)


def test_evaluation_leaves_the_statistics_and_the_mode_alone() -> None:
    model = normed_job().model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draws = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (30, 1, 2, 2), dtype=torch.uint8, generator=draws)
    images = TensorImages(pixels, torch.randint(2, (30,), generator=draws), Scale((128.0,), (64.0,)))
    accuracy, loss = evaluate(model, images, device=torch.device("cpu"), batch_size=7)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    x, y = images.batch(range(30))
    logits = model.eval()(x)
    assert accuracy == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert loss == pytest.approx(float(nn.functional.cross_entropy(logits, y).detach()), rel=1e-5)
