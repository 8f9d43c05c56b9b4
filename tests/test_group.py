"""A group of ranks is one worker: what it pushes is what one rank with all their data would, and it ends as they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from stalempi import preempt
from stalempi.errors import ConfigError, ProtocolError, StallError
from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Policy
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport.inproc import InprocTransport, run_ranks

from .job import make_context, run_job
from .small import data, fill, largest_difference, make_model, momentum, plain, step

torch.set_num_threads(1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_groups_under_bsp_equal_one_process_and_the_ungrouped_job(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    x, y = data(13)

    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        for _ in range(10):
            step(model, optimizer, x[shard::4], y[shard::4])

    grouped = run_job(make_model, make_optimizer, BSP(), train, workers=2, group=2)
    single = run_job(make_model, make_optimizer, BSP(), train, workers=4)
    alone = make_model()
    optimizer = make_optimizer(alone)
    for _ in range(10):
        step(alone, optimizer, x, y)
    assert largest_difference(grouped.model, alone) < 2e-6
    assert largest_difference(grouped.model, single.model) < 2e-6
    assert grouped.stats.updates == 10
    assert [worker.samples for worker in grouped.stats.workers] == [70, 60]
    assert all(largest_difference(model, grouped.model) == 0 for model in grouped.workers)


@pytest.mark.parametrize("steps", [(3, 7, 5), (7, 3, 5), (1, 1, 4)], ids=["leader first", "leader last", "one remains"])
@pytest.mark.parametrize("policy", [BSP(), ASP(), SSP(1), DSSP(1, 3)], ids=str)
def test_ranks_of_a_group_that_end_early_leave_and_no_batch_is_lost(policy: Policy, steps: tuple[int, ...]) -> None:
    x, y = data(8)

    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        for _ in range(steps[shard % 3]):
            step(model, optimizer, x, y)

    job = run_job(make_model, momentum, policy, train, workers=2, group=3)
    assert job.stats.samples == 2 * 8 * sum(steps)
    assert [worker.iterations for worker in job.stats.workers] == [max(steps)] * 2


def test_a_gradient_weighs_what_its_samples_say_and_one_that_nobody_has_touches_nothing() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        fill(model, float(shard))
        next(iter(model.parameters())).grad = None
        optimizer.step(samples=(1, 3)[shard], loss=float(shard))

    job = run_job(make_model, plain, ASP(), train, workers=1, group=2)
    before, after = list(make_model().parameters()), list(job.model.parameters())
    assert torch.equal(before[0], after[0])
    for old, new in zip(before[1:], after[1:], strict=True):
        torch.testing.assert_close(old - new, torch.full_like(old, 0.5 * 0.75))
    assert job.stats.workers[0].loss == 0.75


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_gradients_are_added_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    values = [1.0, 2.0**-9, 2.0**-9, 60000.0 if dtype == torch.float16 else 0.0]

    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        fill(model, values[shard])
        optimizer.step(samples=1)

    job = run_job(
        lambda: _zero(nn.Linear(3, 2, dtype=dtype)),
        lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        ASP(),
        train,
        workers=1,
        group=4,
    )
    expected = torch.tensor(-sum(values) / 4, dtype=torch.float64).to(dtype)
    assert all(bool((p == expected).all()) for p in job.model.parameters())


def _zero(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def test_running_statistics_of_all_ranks_are_combined_by_their_samples() -> None:
    def make_normed() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    x, _ = data(12)
    parts = [slice(0, 4), slice(4, 12), slice(0, 6), slice(6, 12)]

    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x[parts[shard]]).sum().backward()
            optimizer.step()

    grouped = run_job(make_normed, plain, BSP(), train, workers=2, group=2)
    single = run_job(make_normed, plain, BSP(), train, workers=4)
    assert largest_difference(grouped.model, single.model) < 1e-6
    mean = grouped.model.state_dict()["0.running_mean"]
    torch.testing.assert_close(mean, (1 - 0.9**3) * x.mean(0))


def test_a_group_stops_together_once_enough_samples_are_applied() -> None:
    x, y = data(8)
    taken = [0] * 4

    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        while not optimizer.done:
            step(model, optimizer, x, y)
            taken[shard] += 1

    run_job(make_model, momentum, SSP(1), train, workers=2, group=2, total_samples=200)
    assert taken[0] == taken[1]
    assert taken[2] == taken[3]


def test_a_silent_member_is_named_by_its_leader() -> None:
    x, y = data(8)

    def main(transport: InprocTransport) -> None:
        context, model = make_context(transport, group=3), make_model()
        optimizer = DistributedOptimizer(plain(model), model=model, policy=BSP(), context=context, stall_timeout=0.6)
        if context.is_server:
            optimizer.serve()
        step(model, optimizer, x, y)
        time.sleep(1.2 if transport.rank == 3 else 0)
        step(model, optimizer, x, y)

    with pytest.raises(StallError, match=r"rank\(s\) 3 did not push to rank 1"):
        run_ranks(main, 4)


def test_a_leader_that_fails_does_not_go_on_for_its_group() -> None:
    x, y = data(8)
    taken = [0, 0]

    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        for number in range(100):
            if shard == 0 and number == 3:
                raise ZeroDivisionError
            step(model, optimizer, x, y)
            taken[shard] += 1

    with pytest.raises(ZeroDivisionError):
        run_job(make_model, plain, BSP(), train, workers=1, group=2, stall_timeout=0.5)
    assert taken == [3, 3]


def test_groups_refuse_a_policy_that_lets_workers_go_on_with_their_own_copy() -> None:
    with pytest.raises(ConfigError, match="take plain ssp"):
        run_job(make_model, plain, CachedSSP(2), lambda *_: None, workers=1, group=2)


def test_a_push_of_a_wrong_step_is_refused_by_the_leader() -> None:
    x, y = data(8)

    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        if shard == 1:
            assert optimizer._worker
            optimizer._worker.step_count = 4
        step(model, optimizer, x, y)

    with pytest.raises(ProtocolError, match="rank 2 sent step 5 to its group after step 0"):
        run_job(make_model, plain, BSP(), train, workers=1, group=2, stall_timeout=0.3)


def test_a_round_in_which_all_pushes_of_a_group_are_empty_is_one_empty_push() -> None:
    """As a gradient scaler sends them; in the next round one rank alone has found infinity."""
    x, y = data(8)

    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        for round_number in range(3):
            found = round_number == 0 or (round_number, shard) == (1, 0)
            optimizer.found_inf = torch.tensor(float(found))  # type: ignore[attr-defined]
            step(model, optimizer, x, y)

    job = run_job(make_model, momentum, BSP(), train, workers=2, group=2)
    assert [worker.skipped for worker in job.stats.workers] == [1, 1]
    assert (job.stats.updates, job.stats.samples) == (2, 3 * 8 + 4 * 8)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_leader_without_data_stops_with_its_group_and_can_be_the_one_that_is_asked(
    asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = threading.local()
    monkeypatch.setattr(preempt, "requested", lambda: "SIGTEST" if getattr(own, "asked", False) else None)
    ends: dict[int, object] = {}

    def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        try:
            for number in range(50 if shard else 2):
                own.asked = shard == asked == 1 and number == 5
                step(model, optimizer, *data(4))
            own.asked = shard == asked
            optimizer.close()
        except preempt.Preempted as end:
            ends[shard] = end.code

    with pytest.raises(preempt.Preempted):  # of the server
        run_job(make_model, plain, BSP(), train, workers=1, group=2)
    assert ends == {0: preempt.PREEMPTED, 1: preempt.PREEMPTED}
