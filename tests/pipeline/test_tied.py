"""Parameters that two blocks share stay the same in both, and are trained as in one model."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.build import BlockOptions, Shared
from stalempi.pipeline.reference import Reference
from stalempi.pipeline.schedules import BP, DDG, DNI, DSP, FR, GPipe, OneForwardOneBackward, PipeDream, Schedule, TwoBW
from stalempi.pipeline.split import Tie, split
from stalempi.pipeline.update import UpdateOptions
from stalempi.train.loss import cross_entropy

METHODS = [BP(), GPipe(4), OneForwardOneBackward(2), PipeDream(), TwoBW(4), DDG(), FR(), DNI(), FR(accumulate=2)]
METHODS += [DSP((1, 1, 0), (4, 2, 0)), DSP((5, 5, 0), (14, 7, 0)), DSP((0, 0, 0), (0, 0, 0))]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    embedding, output = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    output.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), output)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 7, (8, 3), generator=draws), torch.randint(0, 7, (8, 3), generator=draws))
        for _ in range(count)
    ]


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def train(method: Schedule, count: int, options: BlockOptions | None = None) -> dict[str, Tensor]:
    cut = split(net(), (2, 4))
    reference = Reference(cut.modules, method, make_optimizer, cross_entropy, ties=cut.ties, options=options)
    for x, y in batches(count):
        reference.step(x, y)
    reference.drain()
    return {key: value for module in cut.modules for key, value in module.state_dict().items()}


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_both_copies_stay_the_same_bit_for_bit(method: Schedule) -> None:
    state = train(method, 20)
    assert torch.equal(state["0.weight"], state["5.weight"])
    assert not torch.equal(state["0.weight"], net().state_dict()["0.weight"])


@pytest.mark.parametrize("method", [BP(), GPipe(4), OneForwardOneBackward(4), DSP((0, 0, 0), (0, 0, 0))], ids=str)
def test_synchronous_methods_train_them_as_one_model(method: Schedule) -> None:
    model = net()
    optimizer = make_optimizer(model.parameters())
    for x, y in batches(20):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    state = train(method, 20)
    assert max(float((state[key] - value).abs().max()) for key, value in model.state_dict().items()) < 1e-5


def test_clipping_and_schedules_reach_them_alike_on_both_sides() -> None:
    limits = UpdateOptions(clip_norm=0.05, schedule=lambda samples: 1.0 / (1 + samples))
    state = train(DSP((1, 1, 0), (4, 2, 0)), 20, BlockOptions(update=limits))
    assert torch.equal(state["0.weight"], state["5.weight"])
    moved = (state["0.weight"] - net().state_dict()["0.weight"]).norm()
    free = (train(DSP((1, 1, 0), (4, 2, 0)), 20)["0.weight"] - net().state_dict()["0.weight"]).norm()
    assert 0 < moved < free / 3


def test_an_update_that_overflows_is_left_out_on_both_sides() -> None:
    state = train(FR(), 6, BlockOptions(update=UpdateOptions(loss_scale=1e38)))
    assert torch.equal(state["0.weight"], state["5.weight"])
    assert all(bool(value.isfinite().all()) for value in state.values())


def test_the_upper_end_is_as_late_as_the_lower_one_is_stale() -> None:
    shared = Shared.of([Tie(("0.weight", "5.weight"), (0, 2))])
    assert shared is not None
    assert [shared.lag(method, 3) for method in (BP(), DSP((1, 1, 0), (4, 2, 0)), FR(accumulate=2))] == [0, 4, 1]


@pytest.mark.parametrize(
    "ties",
    [
        [Tie(("a", "b", "c"), (0, 1, 2))],
        [Tie(("a", "b"), (0, 1)), Tie(("c", "d"), (0, 2))],
        [Tie((f"a{i}", f"b{i}"), (0, 1)) for i in range(8)],
    ],
)
def test_other_ties_are_refused(ties: list[Tie]) -> None:
    with pytest.raises(ConfigError, match="can be shared by two blocks"):
        Shared.of(ties)
