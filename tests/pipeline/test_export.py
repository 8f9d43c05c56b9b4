"""Models that are not sequential come apart where they are told to, and still know training from evaluation."""

from __future__ import annotations

import sys

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from stalempi.errors import ConfigError
from stalempi.pipeline.export import split_exported
from stalempi.pipeline.split import Blocks, merge_state_dicts


class Residual(nn.Module):
    """Several tensors cross before `b`, in another order than they are made in; the last two layers share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = first.tanh()
        third = self.b(second) * second + first
        out: Tensor = self.c(self.drop(third))
        return out


class Skips(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))) + x  # type: ignore[no-any-return]


class Drops(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(F.dropout(self.a(x), 0.5, training=self.training)))  # type: ignore[no-any-return]


class Asks(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x) * (2 if self.training else 1)))  # type: ignore[no-any-return]


class Branches(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)  # type: ignore[no-any-return]


def run(blocks: Blocks, x: Tensor) -> Tensor:
    values: tuple[Tensor, ...] = (x,)
    for block in blocks.modules:
        made = block(*values)
        values = made if isinstance(made, tuple) else (made,)
    (result,) = values
    return result


def resnet18() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    return model


def test_torchvisions_resnet_trains_and_evaluates_in_blocks_as_in_one_piece() -> None:
    whole, x = resnet18(), torch.randn(2, 3, 32, 32)
    blocks = split_exported(resnet18(), (x,), ["layer2", "layer4.1"])
    assert (len(blocks.modules), blocks.ties) == (3, ())
    for other in (x, torch.randn(3, 3, 32, 32)):
        expected, result = whole(other), run(blocks, other)
        torch.testing.assert_close(result, expected)
    torch.autograd.backward(expected.sum())
    torch.autograd.backward(result.sum())
    gradients = {key: p.grad for block in blocks.modules for key, p in block.named_parameters()}
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad)
    merged = merge_state_dicts([block.state_dict() for block in blocks.modules])
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(merged[key], value)
    resnet18().load_state_dict(merged, strict=True)
    for block in blocks.modules:
        block.eval()
    torch.testing.assert_close(run(blocks, x), whole.eval()(x))
    assert not torch.allclose(whole(x), whole.train()(x))


def test_several_tensors_cross_and_ties_are_found() -> None:
    torch.manual_seed(1)
    model = Residual()
    model.drop.p = 0.0
    x = torch.randn(3, 4)
    expected = model(x)
    blocks = split_exported(model, (x,), ["b", "c"])
    crossing = blocks.modules[0](x)
    assert len(crossing) == 2
    torch.testing.assert_close(run(blocks, x), expected)
    assert [(set(tie.keys), set(tie.blocks)) for tie in blocks.ties] == [({"a.weight", "c.weight"}, {0, 2})]
    Residual().load_state_dict(
        merge_state_dicts([block.state_dict() for block in blocks.modules], blocks.ties), strict=True
    )


def test_dropout_modules_switch() -> None:
    blocks = split_exported(Residual(), (torch.randn(3, 4),), ["b"])
    x = torch.randn(3, 4)
    assert not torch.equal(run(blocks, x), run(blocks, x))
    for block in blocks.modules:
        block.eval()
    assert torch.equal(run(blocks, x), run(blocks, x))


@pytest.mark.parametrize(
    ("model", "points", "message"),
    [
        (Residual, ["bb"], "split point 'bb' is no module of the model: did you mean b?"),
        (Residual, [], "give at least one"),
        (Residual, ["b", "b"], "each once"),
        (Skips, ["b"], "block 1 takes a value that block 0 does not make"),
        (Drops, ["b"], r"calls aten\.dropout.* make it a module"),
        (Asks, ["b"], "in evaluation the blocks do not do what the model did"),
        (Branches, ["b"], "torch.export cannot trace this Branches"),
    ],
)
def test_what_cannot_be_split_is_one_line(model: type[nn.Module], points: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        split_exported(model(), (torch.randn(3, 4),), points)
    assert "\n" not in str(caught.value)


def test_a_torch_without_the_splitter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining", None)
    with pytest.raises(ConfigError, match=r"has no torch\.distributed\.pipelining: install 2\.4"):
        split_exported(Residual(), (torch.randn(3, 4),), ["b"])


def test_modules_that_are_put_back_stay_in_the_modes_that_they_were_in() -> None:
    model = Residual()
    model.a.eval()
    model.drop.eval()
    blocks = split_exported(model, (torch.randn(3, 4),), ["b"])
    modes = {name: part.training for block in blocks.modules for name, part in block.named_modules()}
    assert {name: modes[name] for name in ("a", "b", "c", "drop")} == {"a": False, "b": True, "c": True, "drop": False}
