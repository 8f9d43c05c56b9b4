"""Each correction does what its formula says, costs the memory that it states, and leaves fresh gradients alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stalempi.correction import CORRECTIONS, DelayCompensation, GapAware, StalenessRate, make_correction
from stalempi.errors import ConfigError
from stalempi.flat import Flat
from stalempi.policy import ASP, CachedSSP
from stalempi.replica import Replica
from stalempi.train.optimizer import DistributedOptimizer

from .job import run_job


def make() -> tuple[Replica, Flat]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.5), bucket_bytes=1000)
    gradients = replica.params.like()
    for view in gradients.views:
        view.copy_(torch.randn(view.shape))
    return replica, gradients


def move(replica: Replica, by: float) -> None:
    for view in replica.params.views:
        view.add_(by)


def test_the_rate_is_divided_by_the_staleness() -> None:
    replica, gradients = make()
    correction = StalenessRate()
    correction.start(replica, 2)
    assert [correction.correct(0, gradients, staleness) for staleness in (0, 1, 4)] == [1.0, 1.0, 0.25]
    assert correction.nbytes == 0


def test_delay_compensation_adds_lambda_g_g_times_the_way_gone_since_this_workers_release() -> None:
    replica, gradients = make()
    correction = DelayCompensation(0.5)
    correction.start(replica, 2)
    move(replica, 0.25)
    correction.released(1)
    before = [view.clone() for view in gradients.views]
    assert correction.correct(1, gradients, 1) == 1.0
    assert all(torch.equal(a, b) for a, b in zip(gradients.views, before, strict=True))
    correction.correct(0, gradients, 1)
    for view, g in zip(gradients.views, before, strict=True):
        assert torch.allclose(view, g + 0.5 * g * g * 0.25)
    assert correction.nbytes == 2 * replica.params.nbytes


def test_adaptive_delay_compensation_divides_by_the_root_mean_square() -> None:
    replica, gradients = make()
    correction = DelayCompensation(2.0, adaptive=True)
    correction.start(replica, 1)
    move(replica, 0.25)
    before = [view.clone() for view in gradients.views]
    correction.correct(0, gradients, 1)
    for view, g in zip(gradients.views, before, strict=True):
        assert torch.allclose(view, g + 2.0 * g * g * 0.25 / (0.05 * g * g + 1e-7).sqrt(), atol=1e-6)
    assert correction.nbytes == 2 * replica.params.nbytes


def test_gap_aware_divides_by_the_way_gone_in_usual_steps() -> None:
    replica, gradients = make()
    correction = GapAware()
    correction.start(replica, 1)
    move(replica, 0.1)
    correction.updated()  # one update: step 0.1, rate 0.5, so the usual step is 0.1 after correction of the bias
    move(replica, 0.2)
    before = [view.clone() for view in gradients.views]
    correction.correct(0, gradients, 2)
    for view, g in zip(gradients.views, before, strict=True):
        assert torch.allclose(view, g / (1 + 0.3 / 0.1), rtol=1e-4)
    assert correction.nbytes == 3 * replica.params.nbytes


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_trains(name: str) -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(20):
            optimizer.zero_grad()
            (model(torch.ones(4, 3)) - 1).square().mean().backward()
            optimizer.step()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    job = run_job(lambda: nn.Linear(3, 1), sgd, ASP(), train, workers=2, correction=make_correction(name))
    assert float((job.model(torch.ones(1, 3)) - 1).abs().detach()) < 0.05


def test_an_unknown_correction_and_one_without_releases_are_refused() -> None:
    with pytest.raises(ConfigError, match="correction must be one of none, rate"):
        make_correction("magic")
    with pytest.raises(ConfigError, match="needs releases"):
        run_job(
            lambda: nn.Linear(1, 1),
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            CachedSSP(1),
            lambda m, o, w: None,
            workers=1,
            correction=StalenessRate(),
            stall_timeout=1.0,
        )
