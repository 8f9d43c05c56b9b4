"""A worker pushes what the user's gradients are, goes on alone where it may, and never waits for what cannot come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError, StalempiError, StallError
from stalempi.policy import ASP, CachedSSP
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport.inproc import InprocTransport, run_ranks

from .job import make_context, run_job

torch.set_num_threads(1)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def alone(
    make_model: Callable[[], nn.Module], loop: Callable[[nn.Module, torch.optim.Optimizer], None]
) -> tuple[nn.Module, nn.Module]:
    """Returns the model that one worker and a server trained under ASP, and the one that plain torch did."""
    job = run_job(make_model, plain, ASP(), lambda model, optimizer, _: loop(model, optimizer), workers=1)
    model = make_model()
    loop(model, plain(model))
    return job.model, model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        assert torch.equal(p, q)


def make_frozen() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("early", [True, False], ids=["before zero_grad", "after zero_grad"])
def test_a_layer_that_thaws_in_mid_run_is_trained_from_then_on(early: bool) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first = cast(nn.Sequential, model)[0]
        for step in range(4):
            if early:
                first.requires_grad_(step >= 2)
            optimizer.zero_grad()
            first.requires_grad_(step >= 2)
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()

    ours, theirs = alone(make_frozen, loop)
    assert not torch.equal(next(theirs.parameters()), next(make_frozen().parameters()))
    assert_same(ours, theirs)


@pytest.mark.parametrize("forget", [True, False], ids=["model.zero_grad", "optimizer.zero_grad"])
def test_sparse_gradients_are_pushed_dense(forget: bool) -> None:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(6, 3, sparse=True)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            model.zero_grad() if forget else optimizer.zero_grad()
            model(torch.tensor([1, 1, 4])).square().sum().backward()
            optimizer.step()

    assert_same(*alone(make_model, loop))


def test_gradients_stay_after_a_step_and_add_up_as_in_torch() -> None:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 2)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    assert_same(*alone(make_model, loop))


@pytest.mark.parametrize("samples", [0, -3])
def test_a_gradient_that_stands_for_no_samples_is_the_callers_fault(samples: int) -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        with pytest.raises(ConfigError, match=f"at least 1 sample, got {samples}"):
            optimizer.step(samples=samples)
        assert optimizer.step_count == 0

    job = run_job(lambda: nn.Linear(2, 1), plain, ASP(), train, workers=1)
    assert job.stats.updates == 0


def ones(model: nn.Module) -> list[Tensor]:
    gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return gradients


def test_a_worker_that_goes_on_alone_takes_the_step_that_the_server_takes() -> None:
    """With one worker its own copy must be the server's, the scheduled rate and the gradients left behind included."""

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(6):
            given = ones(model)
            optimizer.step(samples=4)
            for parameter, gradient in zip(model.parameters(), given, strict=True):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, gradient)

    job = run_job(
        lambda: nn.Linear(2, 1), plain, CachedSSP(2), train, workers=1, schedule=lambda samples: 1 / (1 + samples)
    )
    assert_same(job.model, job.workers[0])


def test_a_worker_does_not_take_alone_the_step_that_the_server_skipped() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for step in range(3):
            for gradient in ones(model):
                gradient.fill_(float("nan") if step == 1 else 1.0)
            optimizer.step()

    job = run_job(lambda: nn.Linear(2, 1), plain, CachedSSP(5), train, workers=1, nonfinite="skip")
    assert job.stats.updates == 2
    assert all(bool(parameter.isfinite().all()) for parameter in job.workers[0].parameters())
    assert_same(job.model, job.workers[0])


def test_a_scheduler_built_on_the_server_alone_does_not_change_the_workers_rate() -> None:
    def main(transport: InprocTransport) -> nn.Module:
        context, model = make_context(transport), nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        optimizer = DistributedOptimizer(plain(model), model=model, policy=ASP(), context=context, stall_timeout=20)
        if context.is_server:
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1)
            optimizer.serve()
            return model
        with optimizer:
            ones(model)
            optimizer.step()
        return model

    server, _ = run_ranks(main, 2)
    assert all(bool((parameter == 0.5).all()) for parameter in server.parameters())


def test_a_server_serves_once() -> None:
    def main(transport: InprocTransport) -> None:
        context, model = make_context(transport), nn.Linear(2, 1)
        optimizer = DistributedOptimizer(plain(model), model=model, policy=ASP(), context=context, stall_timeout=2)
        if not context.is_server:
            optimizer.close()
            return
        optimizer.serve()
        with pytest.raises(ConfigError, match="has served already"):
            optimizer.serve()
        assert optimizer.stats.updates == 0

    run_ranks(main, 2)


def test_a_worker_whose_server_is_silent_does_not_wait_for_it_again_to_leave() -> None:
    def main(transport: InprocTransport) -> float:
        context, model = make_context(transport), nn.Linear(2, 1)
        optimizer = DistributedOptimizer(plain(model), model=model, policy=ASP(), context=context, stall_timeout=0.5)
        if context.is_server:
            return 0.0
        began = time.monotonic()
        ones(model)
        with pytest.raises(StallError, match="no release from the server within 1 s") as caught, optimizer:
            optimizer.step()
        assert caught.value.__context__ is None
        return time.monotonic() - began

    assert 0.9 < run_ranks(main, 2)[1] < 1.8


def test_a_silent_worker_is_noticed_though_others_push_all_the_time() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        ones(model)
        optimizer.step()
        if worker == 1:
            time.sleep(4)
        for _ in range(100):
            if worker == 0:
                time.sleep(0.05)
                optimizer.step()

    with pytest.raises(StalempiError, match=r"worker 1 \(rank 2\) has been silent for 1 s since step 1"):
        run_job(lambda: nn.Linear(2, 1), plain, ASP(), train, workers=2, stall_timeout=1.0)
