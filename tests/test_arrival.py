"""A model that runs while its parameters arrive uses none that has not."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stalempi.arrival import Arrival
from stalempi.errors import ConfigError, StallError
from stalempi.policy import ASP, BSP, SSP, Allreduce, CachedSSP, Policy
from stalempi.replica import Replica
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.worker import Worker

from .job import Job, run_job
from .small import data, largest_difference, make_model, momentum, plain, step

torch.set_num_threads(1)


class Arriving:
    """A model whose parameters are NaN until the parts of a release that hold them are waited for."""

    def __init__(self, model: nn.Module, *, servers: int = 1) -> None:
        self.model, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
        self.replicas = [Replica(model, optimizer, bucket_bytes=64, share=(n, servers)) for n in range(servers)]
        self.arrival = Arrival(self.replicas, self.wait)
        self.parts = [replica.params.slices(replica.release_buckets()) for replica in self.replicas]
        self.whole = [[part.clone() for part in parts] for parts in self.parts]

    def wait(self, server: int, place: int) -> None:
        for part, values in zip(self.parts[server][: place + 1], self.whole[server], strict=False):
            part.copy_(values)

    def begin(self) -> None:
        """Begins a release: what the step itself waits for is there."""
        for replica in self.replicas:
            for storage in replica.params.storages:
                storage.fill_(float("nan"))
        for server, place in self.arrival.first.items():
            self.wait(server, place)

    def missing(self) -> int:
        """Returns how many parts have not arrived."""
        return sum(bool(part.view(torch.float32).isnan().any()) for parts in self.parts for part in parts)


class Tied(nn.Module):
    """Its output layer uses the weights of an embedding, once before the embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.embedding = nn.Linear(6, 6), nn.Embedding(9, 6)
        self.extra = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        early = nn.functional.linear(self.first(x), self.embedding.weight)
        late = self.embedding(early.argmax(-1)) * self.scale + self.extra[2]
        out: Tensor = nn.functional.linear(late, self.embedding.weight)
        return out


class Branches(nn.Module):
    """Takes another way in each step; the first of all by calling its inside only."""

    def __init__(self) -> None:
        super().__init__()
        self.ways, self.way = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]), 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ways[self.way](x)
        return out


def sequence() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(6, 6), nn.Unflatten(0, (1, 5)), layer, nn.LSTM(6, 6, batch_first=True))


def derived() -> nn.Module:
    return nn.Sequential(*(parametrizations.weight_norm(nn.Linear(6, 6)) for _ in range(4)))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch wants to be rid of it; models that have it stay
        return nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Sequential(nn.Linear(6, 6))), nn.Linear(6, 6))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequence": sequence,
    "attention": attention,
    "tied": Tied,
    "branches": Branches,
    "derived": derived,
    "scripted": scripted,
}


def run(model: nn.Module) -> Tensor:
    result = model(torch.linspace(-1, 1, 30).view(5, 6))
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_no_module_uses_what_has_not_arrived(make: Callable[[], nn.Module], train: bool, servers: int) -> None:
    torch.manual_seed(2)
    arriving = Arriving(make().train(train), servers=servers)
    model = arriving.model
    expected = run(model)
    assert not arriving.arrival.may_begin
    arriving.arrival.learn()
    assert arriving.arrival.may_begin
    arriving.begin()
    assert torch.equal(run(model), expected)
    if isinstance(model, Branches):
        for way in range(3):
            arriving.begin()
            model.way = way
            assert run(model).isfinite().all()


def test_a_module_waits_for_no_more_than_it_needs() -> None:
    model = sequence()
    arriving = Arriving(model)
    run(model)
    arriving.arrival.learn()
    arriving.begin()
    missing = [arriving.missing()]
    x = torch.ones(5, 6)
    for layer in model:
        x = layer(x)
        missing.append(arriving.missing())
    assert missing[0] == len(arriving.parts[0])
    assert missing == sorted(set(missing), reverse=True)  # a part or more for each layer
    assert missing[-1] == 0


def test_parameters_of_modules_that_are_never_called_are_there_first() -> None:
    model = sequence()
    arriving = Arriving(model)

    def forward() -> Tensor:
        out = torch.ones(5, 6)
        for layer in model[:4]:
            out = layer(out)
        return nn.functional.linear(out, model.get_parameter("5.weight"))

    expected = forward()
    arriving.arrival.learn()
    arriving.begin()
    assert arriving.missing() == 0  # up to the last one that nobody calls
    assert torch.equal(forward(), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["torch.compile", "module.compile"])
def test_a_compiled_model_never_begins_early(inside: bool) -> None:
    arriving = Arriving(sequence())
    if inside:
        arriving.model.compile(backend="eager")
    run(arriving.model if inside else torch.compile(arriving.model, backend="eager"))  # type: ignore[arg-type]
    arriving.arrival.learn()
    assert not arriving.arrival.may_begin


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int = 0) -> None:
    for number in range(6):
        step(model, optimizer, *data(5, 10 * number + worker))


def job(train: Callable[..., object], policy: Policy, workers: int = 1, **options: Any) -> Job:
    return run_job(make_model, momentum, policy, train, workers=workers, bucket_bytes=64, **options)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"overlap": "off"}, {"compression": "topk:1"}, {"delivery": 0.01}, {"clip_value": 9.0}], ids=str
)
def test_one_worker_is_plain_torch_to_the_last_bit(servers: int, options: dict[str, Any]) -> None:
    done = job(lambda m, o, _: loop(m, o), ASP(), early_forward=True, servers=servers, **options)
    alone = make_model()
    loop(alone, momentum(alone))
    assert largest_difference(done.model, alone) == 0.0
    assert largest_difference(done.workers[-1], alone) == 0.0  # after close all parameters are there


def test_workers_under_bsp_make_what_they_make_with_whole_releases() -> None:
    early, whole = (job(loop, BSP(), workers=3, early_forward=early) for early in (True, False))
    assert largest_difference(early.model, whole.model) == 0.0


def arriving_part(optimizer: DistributedOptimizer) -> bool:
    assert isinstance(optimizer._worker, Worker)
    return optimizer._worker.arriving


def test_step_returns_with_parts_on_their_way_and_what_reads_all_waits_for_all() -> None:
    seen: dict[str, bool] = {}

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        step(model, optimizer, *data(5))
        seen["first"] = arriving_part(optimizer)
        for way in ("state_dict", "synchronize", "step", "skip"):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data(5)[0]), data(5)[1]).backward()
            optimizer.step()
            seen[way] = arriving_part(optimizer)
            if way == "state_dict":
                model.state_dict()
            elif way == "synchronize":
                optimizer.synchronize()
            else:
                optimizer.zero_grad()
                optimizer.step(samples=1)  # without a forward
                continue
            assert not arriving_part(optimizer)

    job(train, SSP(1), early_forward=True)
    assert seen == {"first": False, "state_dict": True, "synchronize": True, "step": True, "skip": True}


def test_a_worker_that_is_let_go_on_without_a_release_steps_alone_as_ever() -> None:
    for early in (True, False):
        done = job(loop, CachedSSP(2), workers=2, early_forward=early)
        assert [worker.iterations for worker in done.stats.workers] == [6, 6]
    assert done.stats.updates == 12


def test_waiting_counts_whatever_is_waited_for() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        loop(model, optimizer)
        time.sleep(0.01)

    done = job(train, ASP(), early_forward=True, delivery=0.05)
    assert 0.2 < done.stats.workers[0].waited < 5


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        (ASP(), {"run_ahead": True}, "leave one of them out"),
        (ASP(), {"group": 2}, "leave the group out"),
        (Allreduce(), {}, "nothing is released"),
    ],
    ids=str,
)
def test_what_has_nothing_to_begin_with_is_refused(policy: Policy, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_job(make_model, plain, policy, loop, workers=2, early_forward=True, **options)


def test_a_part_that_never_comes_is_waited_for_once() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        ours = optimizer._worker
        assert isinstance(ours, Worker)
        for _ in range(2):
            step(model, optimizer, *data(5))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ours.shares[0].end, "receive_part", lambda place, timeout: False)
            with pytest.raises(StallError, match="step 2: no release from the server within"):
                model(data(5)[0])
        assert ours.owed  # so that whoever leaves now does not wait again
        ours.owed = False

    job(train, ASP(), early_forward=True)
