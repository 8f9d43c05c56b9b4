"""Over joined memory, bucket by bucket, an optimizer makes the bits that it makes parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import nn

from stalempi.flat import Bucket, Flat
from stalempi.replica import Replica
from stalempi.stepper import Stepper

torch.set_num_threads(1)

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 300), nn.Linear(300, 31).double(), nn.Linear(31, 5), nn.LayerNorm(5))


def grouped(make: Make) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Makes it with biases in a group of their own, whose rate is higher."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        weights = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        made = make(weights)
        made.add_param_group({"params": rest, "lr": 2 * made.param_groups[0]["lr"]})
        return made

    return optimizer


class Pair:
    """The same model and optimizer twice: stepped joined, and as plain torch steps it."""

    def __init__(self, make: Make, bucket_bytes: int) -> None:
        self.model, self.plain = make_model(), make_model()
        self.optimizer, self.reference = grouped(make)(self.model), grouped(make)(self.plain)
        self.replica = Replica(self.model, self.optimizer, bucket_bytes=bucket_bytes)
        self.stepper = Stepper(self.replica)
        self.gradients: Flat = self.replica.params.like()
        self.draws = torch.Generator().manual_seed(5)

    def step(self, *, without: int | None = None) -> list[Bucket | int | None]:
        """Steps both; returns what the stepper has called."""
        touched = np.ones(len(self.replica.trained), dtype=bool)
        for place, (view, theirs) in enumerate(zip(self.gradients.views, self.plain.parameters(), strict=True)):
            view.copy_(torch.randn(view.shape, generator=self.draws))
            theirs.grad = view.clone()
            if place == without:
                touched[place], theirs.grad = False, None
        called: list[Bucket | int | None] = []
        self.stepper.step(self.gradients, touched, before=called.append, after=called.append)
        self.reference.step()
        return called

    def check(self) -> None:
        """Checks that both have the same parameters and state, to the bit."""
        for ours, its in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(ours, its)
        mine, theirs = self.optimizer.state_dict(), self.reference.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for place, state in theirs["state"].items():
            assert mine["state"][place].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(mine["state"][place][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("bucket_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_bits_and_the_state_are_those_of_plain_torch(make: Make, bucket_bytes: int) -> None:
    pair = Pair(make, bucket_bytes)
    for _ in range(4):
        pair.step()
        pair.check()
    pair.step(without=2)  # from now on parameter by parameter
    pair.check()
    pair.step()
    pair.check()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_saved_state_is_gone_on_from(make: Make) -> None:
    pair = Pair(make, 1000)
    pair.step()
    other = Pair(make, 64)
    for mine, saved in ((other.optimizer, pair.optimizer), (other.reference, pair.reference)):
        mine.load_state_dict(copy.deepcopy(saved.state_dict()))
    other.replica.params.adopt([p.detach().clone() for p in pair.model.parameters()])
    other.replica.params.move(other.replica.trained, [s.clone() for s in other.replica.params.storages])
    other.plain.load_state_dict(pair.plain.state_dict())
    for _ in range(2):
        other.step()
        other.check()


def test_hyper_parameters_may_change_between_steps() -> None:
    pair = Pair(OPTIMIZERS["sgd"], 64)
    for number in range(4):
        for optimizer in (pair.optimizer, pair.reference):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["momentum"] = 0.9 if number > 1 else 0.0  # only then there is a state
        pair.step()
        pair.check()


def test_empty_parameters_are_left_alone() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in (5, 0, (0, 3), 4)])
    groups = [{"params": [model[0], model[3]]}, {"params": [model[1]]}, {"params": [model[2]]}]
    replica = Replica(model, torch.optim.Adam(groups, lr=0.5), bucket_bytes=64)
    stepper, gradients = Stepper(replica), replica.params.like()
    gradients.storages[0].fill_(1.0)
    for _ in range(2):
        stepper.step(gradients, np.ones(4, dtype=bool))
    assert [p.numel() for p in model] == [5, 0, 0, 4]
    assert torch.allclose(torch.cat(list(model)[::3]), torch.zeros(9), atol=1e-6)


def test_each_bucket_is_asked_for_before_its_step_and_told_of_after_it_in_the_order_of_a_release() -> None:
    pair = Pair(OPTIMIZERS["momentum"], 1000)
    buckets = pair.replica.release_buckets()
    assert len(buckets) > 5
    for _ in range(2):
        called = pair.step()
        assert called[::2] == buckets
        assert called[1::2] == list(range(len(buckets)))
    assert pair.step(without=0) == [None]  # as a whole


def test_what_comes_after_a_bucket_is_still_as_it_was() -> None:
    pair = Pair(OPTIMIZERS["adam"], 64)
    before = [part.clone() for part in pair.replica.params.slices(pair.replica.release_buckets())]
    seen: list[int] = []

    def after(place: int) -> None:
        now = pair.replica.params.slices(pair.replica.release_buckets())
        seen.append(sum(not torch.equal(a, b) for a, b in zip(before, now, strict=True)))
        assert all(torch.equal(a, b) for a, b in zip(before[place + 1 :], now[place + 1 :], strict=True))

    for view in pair.gradients.views:
        view.fill_(1.0)
    pair.stepper.step(pair.gradients, np.ones(len(pair.replica.trained), dtype=bool), after=after)
    assert seen == list(range(1, len(before) + 1))
