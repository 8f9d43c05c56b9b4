"""Sparse gradients travel as rows, and the optimizer on the server does with them what it does in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stalempi.compress import Rows
from stalempi.correction import DelayCompensation
from stalempi.errors import ProtocolError
from stalempi.policy import ASP, BSP, SSP, Policy
from stalempi.train.optimizer import DistributedOptimizer

from .job import run_job
from .small import largest_difference

torch.set_num_threads(1)
# torch's own steps with sparse gradients ask whether they should check them
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
ROWS, WIDTH = 40, 6
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Bag(nn.Module):
    def __init__(self, *, only: bool = False, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.top = nn.Identity() if only else nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.top(self.words(x).mean(1))
        return y


def batch(number: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(number)
    return torch.randint(ROWS, (4, 3), generator=draws), torch.randint(3, (4,), generator=draws)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: list[int], scale: float = 1.0) -> None:
    optimizer.zero_grad()
    x, y = (torch.cat(part) for part in zip(*map(batch, numbers), strict=True))
    (scale * nn.functional.cross_entropy(model(x), y)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # else plain SGD adds rows that occur twice one by one
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()), lr=0.05)


OPTIONS: list[dict[str, Any]] = [{}, {"compression": "fp16"}, {"run_ahead": True}, {"servers": 2}, {"bucket_bytes": 64}]


@pytest.mark.parametrize("make", [sgd, momentum, adagrad, sparse_adam])
@pytest.mark.parametrize("overlap", ["thread", "off"])
def test_one_worker_is_plain_torch_to_the_last_bit(make: Make, overlap: str) -> None:
    only = make is sparse_adam  # it takes nothing dense

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(7):
            step(model, optimizer, [number])

    done = run_job(lambda: Bag(only=only), make, ASP(), train, workers=1, overlap=overlap, bucket_bytes=64)
    alone = Bag(only=only)
    optimizer = make(alone)
    for number in range(7):
        step(alone, optimizer, [number])
    assert largest_difference(done.model, alone) == 0.0
    assert largest_difference(done.model, Bag(only=only)) > 0.01
    dense = 4 * ROWS * WIDTH
    assert done.stats.workers[0].bytes_pushed / 7 < 0.6 * dense + (0 if only else 200)


@pytest.mark.parametrize(("make", "servers"), [(sgd, 1), (sgd, 2), (adagrad, 1), (adagrad, 2), (sparse_adam, 1)])
def test_bsp_is_the_mean_of_all_workers_rows(make: Make, servers: int) -> None:
    only = make is sparse_adam

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(7):
            step(model, optimizer, [10 * number + worker])

    done = run_job(lambda: Bag(only=only), make, BSP(), train, workers=3, servers=servers)
    alone = Bag(only=only)
    optimizer = make(alone)
    for number in range(7):
        step(alone, optimizer, [10 * number, 10 * number + 1, 10 * number + 2])
    assert largest_difference(done.model, alone) < 2e-5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("policy", [ASP, lambda: SSP(1)], ids=["asp", "ssp"])
def test_books_balance_whatever_else_is_asked_for(policy: Callable[[], Policy], options: dict[str, Any]) -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(6):
            step(model, optimizer, [10 * number + worker], scale=float("nan") if (worker, number) == (1, 3) else 1.0)

    done = run_job(Bag, sgd, policy(), train, workers=3, nonfinite="skip", **options)
    assert done.stats.updates == 17
    assert [worker.nonfinite for worker in done.stats.workers] == [0, 1, 0]
    assert all(bool(torch.isfinite(parameter).all()) for parameter in done.model.parameters())


@pytest.mark.parametrize(
    "options", [{"group": 2}, {"clip_norm": 1.0}, {"correction": DelayCompensation()}], ids=["group", "clip", "dc"]
)
def test_where_more_is_done_to_gradients_they_are_dense(options: dict[str, Any]) -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(3):
            step(model, optimizer, [number])

    done = run_job(Bag, sgd, ASP(), train, workers=1, **options)
    assert done.stats.workers[0].bytes_pushed > 3 * 4 * ROWS * WIDTH


def test_a_dense_gradient_of_such_a_parameter_is_all_of_its_rows() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model.get_submodule("words").get_parameter("weight").sum().backward()
            optimizer.step(samples=1)

    done = run_job(lambda: Bag(only=True), sgd, ASP(), train, workers=1)
    before, after = Bag(only=True).words.weight, done.model.get_submodule("words").get_parameter("weight")
    assert torch.allclose(after, before - 2 * 0.3)


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.integers(1, 5))
@settings(deadline=None)
def test_rows_come_as_they_were_sent_and_older_ones_are_gone(first: set[int], second: set[int], width: int) -> None:
    here, there = torch.randn(10, width), torch.zeros(10, width)
    sent, received = Rows(here), Rows(there)
    for chosen in (first, second):
        sent.rows = torch.tensor(sorted(chosen), dtype=torch.int64)
        sent.encode()
        assert sent.length == 8 + len(chosen) * (8 + 4 * width)
        received.wire[: sent.length] = sent.wire[: sent.length]
        received.decode()
        expected = torch.zeros(10, width)
        expected[sent.rows] = here[sent.rows]
        assert torch.equal(there, expected)
        assert torch.equal(received.rows, sent.rows)


@pytest.mark.parametrize(("count", "number"), [(11, 0), (-1, 0), (1, 10), (1, -1)])
def test_rows_that_cannot_be_are_refused(count: int, number: int) -> None:
    code = Rows(torch.zeros(10, 2))
    code.wire[:16].view(torch.int64).copy_(torch.tensor([count, number]))
    with pytest.raises(ProtocolError, match="of a matrix that has 10"):
        code.decode()
