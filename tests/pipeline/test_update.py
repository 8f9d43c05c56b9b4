"""What a block's gradients become: means over samples, clipped, scaled, at the rate of the samples so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.update import UpdateOptions, Updater, trained


def make(options: UpdateOptions | None = None, *, lr: float = 1.0) -> tuple[nn.Linear, Updater]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    return module, Updater(trained(module), torch.optim.SGD(module.parameters(), lr=lr), options)


def change(module: nn.Linear, updater: Updater) -> Tensor:
    """Takes a step and returns by how much the weight fell: its gradient, at a learning rate of 1."""
    before = module.weight.detach().clone()
    updater.step()
    return before - module.weight.detach()


def gradients(value: float) -> Mapping[str, Tensor | None]:
    return {"weight": torch.full((2, 3), value), "bias": torch.full((2,), value)}


def all_near(found: Tensor, value: float) -> bool:
    return torch.allclose(found, torch.full_like(found, value), atol=1e-6)


def test_gradients_are_weighted_by_their_samples() -> None:
    module, updater = make()
    updater.gather(gradients(1.0), 6)
    updater.gather(gradients(4.0), 2)
    updater.gather(gradients(0.0), 2)
    assert all_near(change(module, updater), (1.0 * 6 + 4.0 * 2) / 10)
    assert (updater.updates, updater.samples) == (1, 10)
    updater.gather(gradients(1.0), 5)
    assert all_near(change(module, updater), 1.0), "nothing is left of the step before"
    assert (updater.updates, updater.samples) == (2, 15)


def test_one_batch_is_passed_on_bit_for_bit() -> None:
    module, updater = make()
    gradient = torch.randn(2, 3)
    updater.gather({"weight": gradient, "bias": None}, 7)
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, gradient)
    assert module.bias.grad is None
    updater.step()
    assert module.weight.grad is None


def test_gradients_that_share_memory_are_kept_apart() -> None:
    """Autograd hands out one tensor for both terms of a sum, and one number spread where a mean was taken."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    module = Sum()
    updater = Updater(trained(module), torch.optim.SGD(module.parameters(), lr=1.0), UpdateOptions(loss_scale=2.0))
    for _ in range(2):
        a, b = torch.autograd.grad((module.a + module.b).sum(), [module.a, module.b])
        updater.gather({"a": a, "b": b}, 4)
    updater.step()
    assert torch.equal(module.a.detach(), torch.full((3,), -0.5))
    assert torch.equal(module.b.detach(), torch.full((3,), -0.5))


def test_what_was_handed_in_is_not_changed() -> None:
    _, updater = make(UpdateOptions(loss_scale=4.0, clip_norm=0.1))
    mine = torch.ones(2, 3)
    updater.gather({"weight": mine, "bias": None}, 1)
    updater.gather({"weight": mine, "bias": None}, 1)
    updater.step()
    assert torch.equal(mine, torch.ones(2, 3)), "it may be the error gradient that is being sent"


def test_the_norm_is_clipped_and_then_the_values() -> None:
    module, updater = make(UpdateOptions(clip_norm=1.0))
    updater.gather(gradients(10.0), 1)
    assert all_near(change(module, updater), 1 / math.sqrt(8))
    module, updater = make(UpdateOptions(clip_value=0.25))
    updater.gather(gradients(10.0), 1)
    assert all_near(change(module, updater), 0.25)
    module, updater = make(UpdateOptions(clip_norm=100.0, clip_value=100.0))
    updater.gather(gradients(10.0), 1)
    assert all_near(change(module, updater), 10.0)


def test_clipping_is_of_the_mean_that_the_update_takes() -> None:
    module, updater = make(UpdateOptions(clip_value=1.0, loss_scale=8.0))
    updater.gather(gradients(8 * 0.5), 3)
    updater.gather(gradients(8 * 0.7), 3)
    assert all_near(change(module, updater), 0.6)


def test_the_scale_of_the_loss_is_taken_out_and_an_overflow_is_left_out() -> None:
    module, updater = make(UpdateOptions(loss_scale=1024.0))
    assert float(updater.scale_loss(torch.tensor(0.5))) == 512.0
    updater.gather(gradients(1024.0), 4)
    assert all_near(change(module, updater), 1.0)
    for bad in (math.inf, math.nan):
        updater.gather(gradients(1.0), 4)
        updater.gather({"weight": None, "bias": torch.tensor([1.0, bad])}, 4)
        assert torch.equal(change(module, updater), torch.zeros(2, 3))
    assert (updater.updates, updater.skipped, updater.samples) == (3, 2, 20)
    assert bool(torch.isfinite(module.bias).all())
    updater.gather(gradients(1024.0), 4)
    assert all_near(change(module, updater), 1.0), "the next one counts again"


def test_the_learning_rate_follows_the_samples_so_far() -> None:
    seen: list[int] = []

    def schedule(samples: int) -> float:
        seen.append(samples)
        return 0.5 if samples >= 8 else 1.0

    module, updater = make(UpdateOptions(schedule=schedule), lr=2.0)
    found = []
    for _ in range(4):
        updater.gather(gradients(1.0), 3)
        updater.gather(gradients(1.0), 1)
        found.append(float(change(module, updater)[0, 0]))
    assert seen == [0, 4, 8, 12]
    assert found == pytest.approx([2.0, 2.0, 1.0, 1.0])


def test_each_group_keeps_its_own_rate() -> None:
    module = nn.Linear(3, 2)
    groups = [{"params": [module.weight], "lr": 1.0}, {"params": [module.bias], "lr": 0.1}]
    updater = Updater(trained(module), torch.optim.SGD(groups), UpdateOptions(schedule=lambda samples: 0.5))
    before = module.bias.detach().clone()
    updater.gather(gradients(1.0), 1)
    assert all_near(change(module, updater), 0.5)
    assert all_near(before - module.bias.detach(), 0.05)


def test_frozen_parameters_and_blocks_without_any_are_left_alone() -> None:
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    updater = Updater(trained(module), torch.optim.SGD([module.weight], lr=1.0))
    assert list(updater.parameters) == ["weight"]
    empty = Updater({}, None)
    empty.gather({}, 8)
    empty.step()
    assert (empty.updates, empty.samples) == (1, 8)


def test_replicas_agree_on_the_mean_before_it_is_clipped() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    given: list[int] = []

    def agree(found: list[Tensor], samples: int) -> int:
        given.append(len(found))
        for gradient in found:
            gradient.add_(1.0)
        return 3 * samples

    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    updater = Updater(trained(module), optimizer, UpdateOptions(clip_value=1.25, loss_scale=2.0), agree=agree)
    updater.gather(gradients(1.0), 1)
    assert all_near(change(module, updater), 1.25)
    assert given == [2]
    assert updater.samples == 3


@pytest.mark.parametrize("name", ["clip_norm", "clip_value", "loss_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_limits_are_above_zero_and_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be above 0 and finite, got"):
        replace(UpdateOptions(), **{name: value})  # type: ignore[arg-type]
