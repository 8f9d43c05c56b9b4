"""Weights decay; biases and normalisation do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stalempi.train.groups import decay_groups
from stalempi.train.models import build_model


def shapes(model: nn.Module) -> list[list[tuple[int, ...]]]:
    return [[tuple(p.shape) for p in group["params"]] for group in decay_groups(model, 0.1)]


def test_biases_and_norms_are_spared() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4), nn.LayerNorm((2, 2)))
    assert shapes(model) == [[(2, 1, 3, 3), (4, 8)], [(2,), (2,), (2,), (4,), (2, 2), (2, 2)]]
    assert [group["weight_decay"] for group in decay_groups(model, 0.1)] == [0.1, 0.0]


def test_every_parameter_is_in_one_group_and_a_frozen_or_tied_one_not_twice() -> None:
    model = build_model("resnet20", num_classes=10, input_shape=(3, 32, 32))
    grouped = [p for group in decay_groups(model, 0.1) for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))
    tied = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    first, second = tied
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    second.weight = first.weight
    assert shapes(tied) == [[(3, 3)]]
    first.weight.requires_grad_(False)
    assert shapes(tied) == []


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_step_on_no_gradient_shrinks_weights_only(decay: float) -> None:
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.SGD(decay_groups(model, decay), lr=1.0).step()
    assert torch.equal(model.weight, before[0] * (1 - decay))
    assert torch.equal(model.bias, before[1])
