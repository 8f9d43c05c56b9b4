"""The server applies every gradient once, weighted by its samples, and keeps the books; in one process."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError, NonFiniteError, StallError
from stalempi.policy import ASP, BSP, SSP, CachedSSP, Decision, Event, Push
from stalempi.server import ServerOptions
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport import inproc

from .job import run_job
from .small import data, largest_difference, make_model, momentum, plain, step

torch.set_num_threads(1)


def test_bsp_weights_gradients_by_the_samples_they_stand_for() -> None:
    x, y = data(12)
    parts = [slice(0, 1), slice(1, 4), slice(4, 12)]

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(10):
            step(model, optimizer, x[parts[worker]], y[parts[worker]])

    job = run_job(make_model, momentum, BSP(), train, workers=3)
    alone = make_model()
    optimizer = momentum(alone)
    for _ in range(10):
        step(alone, optimizer, x, y)
    assert largest_difference(job.model, alone) < 1e-6
    assert job.stats.updates == 10
    assert [worker.samples for worker in job.stats.workers] == [10, 30, 80]
    assert job.stats.samples == 120


@pytest.mark.parametrize("policy", [ASP(), SSP(2), BSP()], ids=str)
def test_uneven_workers_all_push_what_they_have(policy: ASP | SSP | BSP) -> None:
    x, y = data(8)

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(5 + 3 * worker):
            step(model, optimizer, x, y)

    job = run_job(make_model, momentum, policy, train, workers=3)
    assert [worker.iterations for worker in job.stats.workers] == [5, 8, 11]
    assert sum(worker.applied for worker in job.stats.workers) == 24
    if isinstance(policy, BSP):  # only here is the last release sure to come after the last update
        assert largest_difference(job.model, job.workers[2]) == 0.0


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        self.use = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.heads[self.use](x)
        return out


@pytest.mark.parametrize("forget", [False, True], ids=["optimizer.zero_grad", "model.zero_grad"])
def test_a_parameter_without_a_gradient_in_this_step_is_left_alone_as_in_plain_torch(forget: bool) -> None:
    x, y = data(8)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(6):
            model.use = number // 3  # type: ignore[assignment]
            model.zero_grad() if forget else optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    job = run_job(TwoHeads, momentum, ASP(), lambda m, o, _: loop(m, o), workers=1)
    alone = TwoHeads()
    loop(alone, momentum(alone))
    assert largest_difference(job.model, alone) == 0.0


def test_a_gradient_that_the_user_sets_is_what_is_sent() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()

    job = run_job(make_model, plain, ASP(), train, workers=1)
    for after, before in zip(job.model.parameters(), make_model().parameters(), strict=True):
        assert torch.equal(after.data, before.data - 1.0)


def test_a_torch_scheduler_on_the_worker_takes_effect_on_the_server() -> None:
    x, y = data(8)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        for _ in range(6):
            step(model, optimizer, x, y)
            scheduler.step()

    job = run_job(make_model, momentum, ASP(), lambda m, o, _: loop(m, o), workers=1)
    alone = make_model()
    loop(alone, momentum(alone))
    assert largest_difference(job.model, alone) == 0.0


def test_a_schedule_counts_global_samples() -> None:
    asked: list[int] = []

    def schedule(samples: int) -> float:
        asked.append(samples)
        return 0.0

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(3):
            step(model, optimizer, *data(4))

    job = run_job(make_model, momentum, ASP(), train, workers=2, schedule=schedule)
    assert asked == [0, 4, 8, 12, 16, 20]
    assert largest_difference(job.model, make_model()) == 0.0  # a rate of 0 changes nothing


def test_workers_are_told_to_stop_after_enough_samples() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        while not optimizer.done:
            step(model, optimizer, *data(4))

    job = run_job(make_model, momentum, BSP(), train, workers=2, total_samples=40)
    assert job.stats.samples == 40
    assert job.stats.updates == 5


def poisoned(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
    for number in range(4):
        x, y = data(4)
        step(model, optimizer, x * float("nan") if number == 2 else x, y)


def test_a_gradient_that_is_not_a_number_ends_the_run_with_worker_and_step() -> None:
    with pytest.raises(NonFiniteError, match="worker 0 pushed a gradient with NaN or infinity at step 3"):
        run_job(make_model, momentum, ASP(), poisoned, workers=1, stall_timeout=1.0)


def test_or_is_skipped_and_counted() -> None:
    job = run_job(make_model, momentum, BSP(), poisoned, workers=2, nonfinite="skip")
    assert [worker.nonfinite for worker in job.stats.workers] == [1, 1]
    assert job.stats.updates == 3
    assert job.stats.samples == 3 * 8
    assert all(bool(torch.isfinite(p).all()) for p in job.model.parameters())


def test_a_lingering_release_is_read_whole_though_others_push_meanwhile() -> None:
    """With a delivery of 50 ms every release is still being read when the other worker's push arrives."""
    torn: list[str] = []

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            moved = torch.cat(
                [(p - q).detach().flatten() for p, q in zip(model.parameters(), make_model().parameters(), strict=True)]
            )
            if float(moved.max() - moved.min()) > 1e-5:
                torn.append(f"worker {worker} got parameters of several versions")
            time.sleep(0.01 * worker)

    job = run_job(make_model, plain, ASP(), train, workers=3, delivery=0.05)
    assert torn == []
    assert job.stats.updates == 18
    first = next(job.model.parameters()).data - next(make_model().parameters()).data
    assert torch.allclose(first, torch.full_like(first, -9.0))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def test_running_statistics_are_combined_by_samples_and_counters_by_the_largest() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(1 + worker):
            optimizer.zero_grad()
            model(torch.full((4, 4), 10.0 * (worker + 1)) + torch.randn(4, 4)).sum().backward()
            optimizer.step()

    job = run_job(Norm, momentum, ASP(), train, workers=2)
    state = [model.state_dict() for model in job.workers]
    mean = (4 * state[0]["norm.running_mean"] + 8 * state[1]["norm.running_mean"]) / 12
    assert torch.allclose(job.model.state_dict()["norm.running_mean"], mean)
    assert int(job.model.state_dict()["norm.num_batches_tracked"]) == 2


def test_gap_and_staleness_are_counted_as_they_are_defined() -> None:
    seen: list[tuple[int, int]] = []
    turn = threading.Semaphore(0)

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        """Worker 0 takes three steps, then worker 1 one: its gradient is then three updates old."""
        if worker == 1:
            turn.acquire(timeout=10)
        for _ in range(1 if worker else 3):
            step(model, optimizer, *data(4))
        if worker == 0:
            turn.release()
            time.sleep(0.2)

    def observe(event: Event, decisions: list[Decision]) -> None:
        if isinstance(event, Push):
            seen.append((event.worker, len(decisions)))

    job = run_job(make_model, momentum, ASP(), train, workers=2, observe=observe)
    first, second = (worker.report() for worker in job.stats.workers)
    assert seen == [(0, 2), (0, 2), (0, 2), (1, 2)]
    assert (first["gap_mean"], first["gap_max"], first["staleness_mean"]) == (2.0, 3, 0.0)
    assert (second["gap_mean"], second["gap_max"], second["staleness_mean"]) == (0.0, 0, 3.0)


def test_cached_pulls_keep_ones_own_updates_visible() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(4):
            before = next(model.parameters()).detach().clone()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert bool((next(model.parameters()) <= before - 0.5 + 1e-6).all())

    job = run_job(make_model, plain, CachedSSP(2), train, workers=2)
    assert job.stats.updates == 8


def test_a_silent_worker_is_warned_of_and_then_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        step(model, optimizer, *data(4))
        if worker == 1:
            time.sleep(3.5)
        step(model, optimizer, *data(4))

    with (
        caplog.at_level(logging.WARNING, "stalempi"),
        pytest.raises(StallError, match=r"worker 1 \(rank 2\) has been silent"),
    ):
        run_job(make_model, momentum, BSP(), train, workers=2, stall_timeout=2.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "waiting for it: workers 0" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerOptions(total_samples=0),
        lambda: ServerOptions(nonfinite="ignore"),
        lambda: ServerOptions(stall_timeout=0),
    ],
    ids=["samples", "nonfinite", "timeout"],
)
def test_options_that_cannot_be_are_refused(make: Callable[[], ServerOptions]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("servers", [1, 2])
def test_each_part_of_the_parameters_is_sent_once_it_is_stepped_before_the_next_one_is(
    monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    events: list[tuple[int, str, int]] = []

    def record(cls: type, name: str, what: str, place: int) -> None:
        inner = getattr(cls, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append((threading.get_ident(), what, args[place] if len(args) > place else 0))
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, call)

    record(inproc._InprocServerEnd, "announce", "announce", 0)
    record(inproc._InprocServerEnd, "send", "send", 2)
    record(torch.optim.SGD, "step", "step", 9)

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(3):
            step(model, optimizer, *data(8))

    run_job(make_model, momentum, BSP(), train, workers=2, servers=servers, bucket_bytes=64)
    for server in {thread for thread, _, _ in events}:
        mine = [(what, number) for thread, what, number in events if thread == server]
        count = 1 + max(number for what, number in mine if what == "send")
        steps = [[("step", 0), ("send", place), ("send", place)] for place in range(count)]
        assert count > 1
        assert mine == 3 * [("announce", 0), ("announce", 1), *itertools.chain.from_iterable(steps)]
