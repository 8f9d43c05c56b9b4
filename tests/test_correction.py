"""Each correction does what its formula says, costs the memory that it states, and leaves fresh gradients alone."""

from __future__ import annotations

import threading

import numpy as np
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
from .small import fill, make_model, plain


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
        assert torch.allclose(view, g + 2.0 * g * g * 0.25 / (g * g + 1e-7).sqrt(), atol=1e-6)
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


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_a_gradient_that_is_fresh_is_left_as_it_is(name: str) -> None:
    replica, gradients = make()
    correction = make_correction(name)
    assert correction is not None
    correction.start(replica, 2)
    for _ in range(3):
        before = [view.clone() for view in gradients.views]
        assert correction.correct(1, gradients, 0) == 1.0
        assert all(torch.equal(a, b) for a, b in zip(gradients.views, before, strict=True))
        move(replica, 0.1)
        correction.updated()
        correction.released(1)


def test_adaptive_delay_compensation_remembers_the_squares_of_earlier_gradients() -> None:
    replica, gradients = make()
    correction = DelayCompensation(2.0, adaptive=True)
    correction.start(replica, 1)
    g = [view.numpy().astype(np.float64) for view in gradients.views]
    mean = [np.zeros_like(values) for values in g]
    for _ in range(3):
        for view, values in zip(gradients.views, g, strict=True):
            view.copy_(torch.from_numpy(values))
        move(replica, 0.25)
        correction.correct(0, gradients, 1)
        correction.released(0)
        mean = [0.95 * m + 0.05 * values**2 for m, values in zip(mean, g, strict=True)]
    for view, values, m in zip(gradients.views, g, mean, strict=True):
        expected = values + 2.0 * values**2 * 0.25 / np.sqrt(m / (1 - 0.95**3) + 1e-7)
        assert np.allclose(view.numpy(), expected, rtol=1e-4)


def test_gap_aware_keeps_a_mean_square_of_steps_and_the_largest_rate() -> None:
    """Steps of 0.1 at a rate of 0.5, of 0.3 at 0.5 and of 0.05 at 0.25: C is 0.5 times the rms of step / rate."""
    replica, gradients = make()
    correction = GapAware()
    correction.start(replica, 2)
    mean = 0.0
    for step, rate in ((0.1, 0.5), (0.3, 0.5), (0.05, 0.25)):
        replica.optimizer.param_groups[0]["lr"] = rate
        move(replica, step)
        correction.updated()
        mean = 0.999 * mean + 0.001 * (step / rate) ** 2
    usual = 0.5 * np.sqrt(mean / (1 - 0.999**3))
    before = [view.clone() for view in gradients.views]
    correction.correct(1, gradients, 3)
    for view, g in zip(gradients.views, before, strict=True):
        assert torch.allclose(view, g / (1 + 0.45 / usual), rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
@pytest.mark.parametrize("workers", [1, 4])
def test_the_bytes_stated_are_the_bytes_held(name: str, workers: int) -> None:
    replica, gradients = make()
    correction = make_correction(name)
    assert correction is not None
    correction.start(replica, workers)
    correction.correct(0, gradients, 1)
    correction.updated()
    correction.released(0)
    assert correction.nbytes == sum(storage.nbytes for flat in held(correction) for storage in flat.storages)


def held(correction: object) -> list[Flat]:
    """Returns whatever `correction` keeps of the size of the parameters; its attributes hold nothing else that is."""
    found: list[Flat] = []
    for value in vars(correction).values():
        assert not isinstance(value, torch.Tensor)
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Flat)]
    return found


def test_the_rate_of_a_stale_gradient_is_divided_for_its_own_update_only() -> None:
    """Worker 1's gradient is two updates old when it is applied: it moves the parameters half as far."""
    first_done, second_done = threading.Event(), threading.Event()

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        if worker == 1:
            assert first_done.wait(10)
        for _ in range(1 if worker else 2):
            fill(model, 1.0)
            optimizer.step(samples=1)
        first_done.set()
        if worker == 1:
            second_done.set()
            return
        assert second_done.wait(10)
        fill(model, 1.0)
        optimizer.step(samples=1)

    job = run_job(make_model, plain, ASP(), train, workers=2, correction=StalenessRate())
    gone = next(make_model().parameters()) - next(job.model.parameters())
    assert [worker.staleness_sum for worker in job.stats.workers] == [1, 2]
    assert torch.allclose(gone, torch.full_like(gone, 0.5 + 0.5 + 0.25 + 0.5))


@pytest.mark.parametrize("strength", [-1.0, float("nan")])
def test_a_strength_that_cannot_be_is_refused(strength: float) -> None:
    with pytest.raises(ConfigError, match="strength must be at least 0"):
        DelayCompensation(strength)


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
