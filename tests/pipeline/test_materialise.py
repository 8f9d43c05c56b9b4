"""Blocks of a model on the meta device get the same values whatever the cut, and the others get none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.materialise import materialise
from stalempi.pipeline.split import Blocks, flatten, merge_state_dicts, split
from stalempi.train.models import build_model

CPU = torch.device("cpu")


def on_meta(name: str) -> nn.Module:
    shape = (8,) if name.startswith("transformer") else (3, 32, 32)
    with torch.device("meta"):
        return build_model(name, num_classes=10, input_shape=shape)


def cut(model: nn.Module, blocks: int) -> Blocks:
    units = len(flatten(model))
    return split(model, [units * k // blocks for k in range(1, blocks)])


def filled(name: str, blocks: int, seed: int = 0) -> dict[str, Tensor]:
    """Returns the state of the whole model, each block filled in from a split of its own, as by ranks."""
    parts = []
    for number in range(blocks):
        pieces = cut(on_meta(name), blocks)
        parts.append(materialise(pieces, number, seed=seed, device=CPU).state_dict())
        for other, module in enumerate(pieces.modules):
            tensors = [*module.parameters(), *module.buffers()]
            assert all(tensor.is_meta == (other != number) for tensor in tensors)
    return merge_state_dicts(parts, pieces.ties)


@pytest.mark.parametrize("name", ["cnn", "resnet11", "vgg19-small", "transformer-tiny", "transformer-tiny-tied"])
def test_values_do_not_depend_on_the_cut(name: str) -> None:
    whole = filled(name, 1)
    on_meta(name).to_empty(device=CPU).load_state_dict(whole, strict=True)
    for blocks in (2, 3):
        state = filled(name, blocks)
        assert list(state) == list(whole)
        assert all(torch.equal(state[key], whole[key]) for key in whole)
    other = filled(name, 1, seed=1)
    assert any(not torch.equal(other[key], whole[key]) for key in whole)


def test_units_differ_and_running_statistics_are_new() -> None:
    state = filled("resnet11", 1)
    assert not torch.equal(state["block2_0.conv2.weight"][:16, :16], state["block1_0.conv2.weight"])
    assert not state["bn.running_mean"].any()
    assert bool((state["bn.running_var"] == 1).all())
    assert int(state["bn.num_batches_tracked"]) == 0


@pytest.mark.parametrize("name", ["resnet20", "resnet50", "transformer-tiny"])
def test_values_are_distributed_as_the_constructor_draws_them(name: str) -> None:
    """A layer that is drawn otherwise in `reset_parameters` than in the constructor would stand out."""
    shape = (8,) if name.startswith("transformer") else (3, 32, 32)
    torch.manual_seed(0)
    built = build_model(name, num_classes=10, input_shape=shape).state_dict()
    state = filled(name, 1)
    large = [key for key, value in built.items() if value.is_floating_point() and value.numel() > 200]
    assert len(large) > 5
    for key in large:
        assert float(state[key].std()) == pytest.approx(float(built[key].std()), rel=0.35), key


def test_a_parameter_shared_inside_a_block_stays_shared() -> None:
    block = materialise(split(on_meta("transformer-tiny-tied"), []), 0, seed=0, device=CPU)
    assert block.get_parameter("logits.weight") is block.get_parameter("embed.tokens.weight")


def test_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    filled("cnn", 2)
    assert torch.equal(before, torch.get_rng_state())


class Scaled(nn.Module):
    """Has a parameter that nobody could initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


class Half(Scaled):
    """Forgets its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (Scaled, r"a\.1, a Scaled, has no reset_parameters\(\)"),
        (Half, r"a\.1\.table is not set by reset_parameters\(\)"),
    ],
)
def test_what_cannot_be_initialised_is_named(unit: type[nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential()
        model.add_module("a", nn.Sequential(nn.Linear(2, 2), unit()))
    with pytest.raises(ConfigError, match=message):
        materialise(split(model, []), 0, seed=0, device=CPU)
