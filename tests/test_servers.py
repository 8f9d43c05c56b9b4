"""Several servers make together what one makes alone, to the last bit, and rank 0 alone decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stalempi import preempt
from stalempi.correction import make_correction
from stalempi.errors import ConfigError
from stalempi.holder import Holder, ServerOptions
from stalempi.orders import Order, Orders, read_orders
from stalempi.policy import ASP, BSP, DSSP, SSP, Allreduce, Apply, CachedSSP, Decision, Drop, Event, Policy, Push
from stalempi.replica import Replica
from stalempi.roles import assign_role
from stalempi.shares import share_out
from stalempi.train.evaluation import Evaluation
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport.inproc import InprocTransport, run_ranks
from stalempi.transport.message import Header, Kind

from .job import Job, make_context, run_job
from .small import data, fill, largest_difference, momentum, step

torch.set_num_threads(1)
SERVERS = 3


def make_net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": others}, {"params": [first], "lr": 0.002}]
    return torch.optim.Adam(groups, lr=0.01)


def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
    for number in range(8):
        step(model, optimizer, *data(5, 100 * worker + number))


def go(policy: Policy, servers: int, make: Callable[[nn.Module], torch.optim.Optimizer] = momentum, **more: Any) -> Job:
    return run_job(make_net, make, policy, train, servers=servers, bucket_bytes=64, **{"workers": 3} | more)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 8))
def test_shares_are_whole_parameters_and_as_even_as_the_largest_allows(sizes: list[int], servers: int) -> None:
    if len(sizes) < servers:
        with pytest.raises(ConfigError, match="take fewer servers"):
            share_out(sizes, servers)
        return
    found = share_out(sizes, servers)
    assert set(found) == set(range(servers))
    loads = [sum(size for size, its in zip(sizes, found, strict=True) if its == server) for server in range(servers)]
    assert max(loads) - min(loads) <= max(sizes) + len(sizes)


@pytest.mark.parametrize("make", [momentum, adam], ids=["momentum", "Adam"])
@pytest.mark.parametrize("options", [{}, {"compression": "fp16"}, {"clip_value": 0.01}], ids=str)
def test_bsp_with_several_servers_is_bsp_with_one(
    make: Callable[[nn.Module], torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    several, one = go(BSP(), SERVERS, make, **options), go(BSP(), 1, make, **options)
    assert largest_difference(several.model, one.model) == 0.0
    assert largest_difference(several.model, make_net()) > 0.01
    for worker in several.workers[SERVERS - 1 :]:
        pairs = zip(worker.parameters(), one.model.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert several.stats.updates == 8
    assert several.stats.samples == one.stats.samples == 120


@pytest.mark.parametrize("make", [momentum, adam], ids=["momentum", "Adam"])
def test_each_server_has_the_optimizer_state_of_its_share_and_no_other(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    def states(servers: int) -> list[dict[str, Any]]:
        """Returns the state by name of each server's parameters."""
        made: dict[int, torch.optim.Optimizer] = {}

        def remember(model: nn.Module) -> torch.optim.Optimizer:
            made[id(model)] = make(model)
            return made[id(model)]

        done = go(BSP(), servers, remember)
        models = [done.model, *done.workers[: servers - 1]]
        return [
            {name: state[p] for name, p in model.named_parameters() if p in state}
            for model in models
            for state in [made[id(model)].state]
        ]

    (one,), several = states(1), states(SERVERS)
    assert sorted(name for held in several for name in held) == sorted(one)
    for held in several:
        assert held
        for name, state in held.items():
            assert state.keys() == one[name].keys()
            assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(one[name][key])) for key in state)


@pytest.mark.parametrize("correction", ["none", "rate", "dc-asgd", "gap-aware"])
@pytest.mark.parametrize(
    "policy", [ASP, lambda: SSP(1), lambda: DSSP(0, 3), lambda: BSP(backup=1)], ids=lambda p: str(p())
)
def test_the_same_order_of_events_gives_the_same_bits_with_one_server(
    policy: Callable[[], Policy], correction: str
) -> None:
    """What rank 0 decided is done again by one server, with the same gradients in the same order."""
    record: list[tuple[Event, list[Decision]]] = []
    several = run_job(
        make_net,
        momentum,
        policy(),
        fixed,
        workers=3,
        servers=SERVERS,
        bucket_bytes=64,
        observe=lambda event, decisions: record.append((event, list(decisions))),
        correction=correction,
    )
    model = make_net()
    one = OneServer(model, momentum(model), correction, workers=3)
    for event, decisions in record:
        one.play(event, decisions)
    assert largest_difference(several.model, model) == 0.0
    assert several.stats.updates == one.holder.stats.updates >= 8


def fixed(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
    """Gradients do not depend on parameters, so that a replay needs no workers."""
    for number in range(8):
        optimizer.zero_grad()
        fill(model, (worker + 1) * 0.01 * (number + 1))
        optimizer.step(samples=worker + 1)


class OneServer:
    """Does what was decided in another job, with the gradients that `fixed` makes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, correction: str, workers: int) -> None:
        self.replica = Replica(model, optimizer, bucket_bytes=64)
        self.correction = make_correction(correction)
        transport = InprocTransport.group(workers + 1)[0]
        self.holder = Holder(self.replica, transport, options=ServerOptions(), correction=self.correction)
        self.counts, self.hyper = [0] * workers, self.replica.read_hyper()

    def play(self, event: Event, decisions: list[Decision]) -> None:
        if isinstance(event, Push):
            worker = event.worker
            self.counts[worker] += 1
            slot = self.holder.slots[worker]
            for view in slot.gradients.views:
                view.fill_((worker + 1) * 0.01 * self.counts[worker])
            slot.touched[:] = True
            slot.hyper[:] = self.hyper
            header = Header(Kind.PUSH, worker + 1, self.replica.layout, self.counts[worker], version=slot.version)
            header.samples, header.nbytes = worker + 1, slot.packet.parts.nbytes
            header.pack_into(slot.packet.header)
            self.holder.take(worker, header)
        for decision in decisions:
            if isinstance(decision, Apply):
                self.holder.apply(decision.workers)
            elif isinstance(decision, Drop):
                self.holder.drop(decision.worker)
            else:
                self.holder.slots[decision.worker].version = self.holder.stats.updates
                if self.correction:
                    self.correction.released(decision.worker)


@pytest.mark.parametrize("options", [{"run_ahead": True}, {"overlap": "off"}, {"total_samples": 60}], ids=str)
def test_books_balance_and_workers_end_with_what_the_servers_have(options: dict[str, Any]) -> None:
    def until_done(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(8):
            step(model, optimizer, *data(5, 100 * worker + number))
            if optimizer.done:
                break

    done = run_job(make_net, momentum, SSP(2), until_done, workers=3, servers=2, bucket_bytes=64, **options)
    stats = done.stats
    assert sum(worker.applied for worker in stats.workers) == stats.updates
    assert stats.samples == 5 * stats.updates >= min(60, options.get("total_samples", 120))


@pytest.mark.parametrize("evaluator", [False, True], ids=["after training", "on its own rank"])
def test_snapshots_along_the_way_are_of_the_whole_model_at_one_version(evaluator: bool) -> None:
    """Parameters all move alike, so a snapshot of mixed versions would have several values."""
    seen: list[set[float]] = []

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (3, 50, 7)])

    def measure(model: nn.Module) -> tuple[float, float]:
        values = {float(value) for parameter in model.parameters() for value in parameter.detach()}
        seen.append(values)
        return 0.0, 0.0

    def pull(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(10):
            optimizer.zero_grad()
            fill(model, -1.0)
            optimizer.step(samples=1)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    evaluation = lambda: Evaluation(measure, 4)  # noqa: E731
    run_job(Same, plain, ASP(), pull, workers=2, servers=2, evaluation=evaluation, evaluator=evaluator)
    assert [len(values) for values in seen] == [1] * len(seen)
    assert seen[-1] == {20.0}
    assert len(seen) >= (1 if evaluator else 4)  # a busy evaluator skips some


def test_a_gradient_that_is_not_finite_is_skipped_on_every_server() -> None:
    def poor(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(4):
            x, y = data(5, number)
            step(model, optimizer, x * (float("nan") if number == 2 else 1.0), y)

    one = run_job(make_net, momentum, BSP(), poor, workers=1, nonfinite="skip")
    several = run_job(make_net, momentum, BSP(), poor, workers=1, servers=2, nonfinite="skip")
    pairs = zip(several.model.parameters(), one.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert (several.stats.workers[0].nonfinite, several.stats.updates) == (1, 3)


def test_a_signal_stops_all_servers() -> None:
    def asked(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(1000):
            if number == 5 and worker == 0:
                preempt._signal = "SIGTEST"
            step(model, optimizer, *data(5, number))

    try:
        with pytest.raises(preempt.Preempted):
            run_job(make_net, momentum, SSP(1), asked, workers=2, servers=2)
    finally:
        preempt._signal = None


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        (CachedSSP(2), {}, "plain ssp"),
        (BSP(), {"clip_norm": 1.0}, "whole norm"),
        (Allreduce(), {}, "no servers"),
    ],
    ids=str,
)
def test_what_several_servers_cannot_do_is_said(policy: Policy, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_job(make_net, momentum, policy, train, workers=2, servers=2, **options)


def test_roles_of_several_servers() -> None:
    roles = [assign_role(rank, 5, servers=2) for rank in range(5)]
    assert [role.is_server for role in roles] == [True, True, False, False, False]
    assert [role.worker_rank for role in roles] == [None, None, 0, 1, 2]
    assert list(roles[1].takes_from) == [2, 3, 4]
    assert str(roles[1]) == "server 1"
    assert [str(assign_role(rank, 4, servers=2, evaluator=True)) for rank in (2, 3)] == ["worker 0", "evaluator"]
    for size, words in ((2, "at least 3 ranks, 2 servers and one worker"), (5, "with one server only")):
        with pytest.raises(ConfigError, match=words):
            assign_role(0, size, servers=2, group=1 if size == 2 else 2)
    with pytest.raises(ConfigError, match="servers=0"):
        assign_role(0, 3, servers=0)


def test_more_servers_than_parameters_are_refused() -> None:
    def main(transport: InprocTransport) -> None:
        context = make_context(transport, servers=3)
        model = nn.Linear(2, 2)
        DistributedOptimizer(momentum(model), model=model, policy=BSP(), context=context)

    with pytest.raises(ConfigError, match="3 servers share 2"):
        run_ranks(main, 4)


def test_orders_come_as_they_were_given() -> None:
    given_ = [(Order.TAKE, (3,)), (Order.APPLY, (0, 2, 5)), (Order.RELEASE, (1,)), (Order.END, ())]
    numbers = [number for order, workers in given_ for number in (order, len(workers), *workers)]
    assert list(read_orders(torch.tensor(numbers))) == given_
    nobody = Orders([], 2)
    nobody.gather()
    nobody.end()
