"""Blocks compute what the whole model computes, and their states are parts of its state."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.split import Tie, flatten, merge_state_dicts, split


def nested() -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
    return nn.Sequential(
        OrderedDict(stem=stem, empty=nn.Sequential(), tail=nn.Sequential(nn.Linear(6, 6)), fc=nn.Linear(6, 3))
    )


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    return model


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]  # torch's own lacks annotations
        return 2 * y


def test_units_have_their_names_in_the_model() -> None:
    assert [unit.name for unit in flatten(nested())] == ["stem.0", "stem.1", "stem.2", "tail.0", "fc"]


def test_a_sequential_that_does_more_than_call_its_children_stays_whole() -> None:
    hooked = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    hooked.register_forward_hook(lambda module, args, result: result + 1)
    units = flatten(nn.Sequential(Doubled(nn.Linear(2, 2), nn.ReLU()), hooked, nn.Sequential(nn.ReLU())))
    assert [unit.name for unit in units] == ["0", "1", "2.0"]


@pytest.mark.parametrize("cuts", [cuts for k in range(5) for cuts in combinations(range(1, 5), k)])
def test_blocks_in_a_row_are_the_model_and_their_states_are_its_state(cuts: tuple[int, ...]) -> None:
    model, x = nested(), torch.randn(8, 4)
    expected, before = model(x), {key: value.clone() for key, value in model.state_dict().items()}
    blocks = split(nested(), cuts)
    y = x
    for block in blocks.modules:
        y = block(y)
    assert torch.equal(y, expected)
    assert (len(blocks.modules), blocks.boundaries, blocks.ties) == (len(cuts) + 1, cuts, ())
    merged = merge_state_dicts([block.state_dict() for block in blocks.modules])
    assert list(merged) == list(before)
    assert all(torch.equal(merged[key], before[key]) for key in before)
    nested().load_state_dict(merged, strict=True)


def test_a_block_keeps_the_modes_of_its_parts() -> None:
    model = nested()
    model.get_submodule("stem.1").eval()
    assert not split(model, [1]).modules[1].get_submodule("stem.1").training
    assert not any(module.training for block in split(nested().eval(), [1, 3]).modules for module in block.modules())


def test_a_tied_parameter_becomes_a_copy_in_each_block() -> None:
    blocks = split(tied(), [1])
    assert blocks.ties == (Tie(("0.weight", "2.weight"), (0, 1)),)
    one, other = (block.get_parameter(key) for block, key in zip(blocks.modules, blocks.ties[0].keys, strict=True))
    assert one is not other
    assert torch.equal(one, other)
    assert one.data_ptr() != other.data_ptr()
    whole = tied()
    whole.load_state_dict(merge_state_dicts([block.state_dict() for block in blocks.modules], blocks.ties), strict=True)
    assert split(tied(), []).ties == ()


def test_a_parameter_tied_twice_in_one_later_block_is_one_copy_there() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[2].weight = model[0].weight
    blocks = split(model, [1])
    assert blocks.ties == (Tie(("0.weight", "1.weight", "2.weight"), (0, 1, 1)),)
    assert blocks.modules[1].get_parameter("1.weight") is blocks.modules[1].get_parameter("2.weight")


def test_copies_that_differ_are_not_merged() -> None:
    blocks = split(tied(), [1])
    states = [block.state_dict() for block in blocks.modules]
    with torch.no_grad():
        blocks.modules[1].get_parameter("2.weight").add_(1)
    with pytest.raises(ConfigError, match=r"copies of one parameter differ: 0\.weight and 2\.weight"):
        merge_state_dicts(states, blocks.ties)
    with pytest.raises(ConfigError, match=r"tied parameter 2\.weight is in no block's state"):
        merge_state_dicts(states[:1], blocks.ties)
    with pytest.raises(ConfigError, match=r"0\.weight is in the state of two blocks"):
        merge_state_dicts([states[0], states[0]])


def test_a_module_without_state_may_be_in_two_blocks_and_one_with_state_may_not() -> None:
    relu, norm = nn.ReLU(), nn.BatchNorm1d(2)
    assert len(split(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu), [2]).modules) == 2
    twice = nn.Sequential(norm, nn.Linear(2, 2), norm)
    with pytest.raises(ConfigError, match="0 in block 0 and 2 in block 1 are one module"):
        split(twice, [1])
    assert list(split(twice, []).modules[0].state_dict()) == list(twice.state_dict())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "a Linear is no plain nn.Sequential"),
        (Doubled(nn.ReLU()), "a Doubled is no plain nn.Sequential"),
        (nn.Sequential(), "empty"),
    ],
)
def test_what_has_no_units_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flatten(model)


def test_boundaries_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"boundaries \(5,\): a model of 5 unit"):
        split(nested(), [5])
