"""DistributedOptimizer is a torch optimizer whose steps the server takes, and says what it cannot do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.policy import ASP
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.train.samples import count_samples
from stalempi.transport.inproc import InprocTransport, run_ranks

from .job import make_context, run_job
from .small import data, make_model, momentum, step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, *, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def test_samples_are_counted_as_they_pass_the_model_in_training() -> None:
    model = Keyword()
    count = count_samples(model)
    model(x=torch.zeros(5, 3))
    model(x=torch.zeros(2, 3))
    with torch.no_grad():
        model(x=torch.zeros(9, 3))
    model.eval()
    model(x=torch.zeros(9, 3))
    assert count.take() == 7
    assert count.take() == 0


def test_a_step_may_say_its_samples_and_take_a_closure() -> None:
    losses: list[float] = []

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure, samples=11)
        assert isinstance(loss, Tensor)
        losses.append(float(loss.detach()))

    job = run_job(lambda: nn.Linear(3, 1), sgd, ASP(), train, workers=1)
    assert job.stats.samples == 11
    assert job.stats.loss == pytest.approx(losses[0])


def test_what_a_role_cannot_do_is_said() -> None:
    def main(transport: InprocTransport) -> str:
        context = make_context(transport)
        model = nn.Linear(2, 2)
        optimizer = DistributedOptimizer(sgd(model), model=model, policy=ASP(), context=context, stall_timeout=20)
        if context.is_server:
            with pytest.raises(ConfigError, match="step is for a worker"):
                optimizer.step()
            optimizer.serve()
            return "served"
        with pytest.raises(ConfigError, match="serve is for the server, but this is worker 0"):
            optimizer.serve()
        optimizer.close()
        optimizer.close()
        with pytest.raises(ConfigError, match="a worker that has not left"):
            optimizer.step()
        with pytest.raises(ConfigError, match="cannot be copied"):
            copy.deepcopy(optimizer)
        return "worked"

    assert run_ranks(main, 2) == ["served", "worked"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS needs a closure"),
        (lambda model: sgd(nn.Linear(2, 2)), "not in the model"),
        (lambda model: model, "must be a plain torch optimizer"),
    ],
    ids=["LBFGS", "another model", "no optimizer"],
)
def test_an_optimizer_that_cannot_be_served_is_refused(make: object, said: str) -> None:
    model = nn.Linear(2, 2)
    assert callable(make)
    context = make_context(InprocTransport.group(2)[0])
    with pytest.raises(ConfigError, match=said):
        DistributedOptimizer(make(model), model=model, policy=ASP(), context=context)


def test_models_that_differ_are_refused_on_every_rank() -> None:
    def main(transport: InprocTransport) -> None:
        model = nn.Linear(2, 2 + transport.rank // 2)
        with pytest.raises(ConfigError, match=r"rank 2 has 'parameter weight \(3, 2\)"):
            DistributedOptimizer(
                sgd(model), model=model, policy=ASP(), context=make_context(transport), stall_timeout=20
            )

    run_ranks(main, 3)


def test_step_hooks_and_profilers_see_a_step_as_they_do_in_plain_torch() -> None:
    seen: list[str] = []

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        step(model, optimizer, *data(4))
        before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        after = optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        step(model, optimizer, *data(4))
        before.remove()
        after.remove()
        with torch.profiler.profile() as profile:
            step(model, optimizer, *data(4))
        seen.extend(event.key for event in profile.key_averages() if event.key.startswith("Optimizer.step"))

    run_job(make_model, momentum, ASP(), train, workers=1)
    assert seen == ["before", "after", "Optimizer.step#DistributedOptimizer.step"]
