"""Models have the published sizes, fit the images, and say so when they do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stalempi.errors import ConfigError
from stalempi.train.models import MODELS, build_model
from stalempi.train.models.resnet import BasicBlock

CIFAR = (3, 32, 32)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "million"),
    # He et al. 2016, table 6
    [("resnet20", 0.27), ("resnet32", 0.46), ("resnet56", 0.85), ("resnet110", 1.7)],
)
def test_cifar_resnets_have_the_published_size(name: str, million: float) -> None:
    model = build_model(name, num_classes=10, input_shape=CIFAR)
    assert parameters(model) / 1e6 == pytest.approx(million, abs=0.04 if million > 1 else 0.006)
    weighted = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(weighted) == int(name.removeprefix("resnet"))


def test_resnet50_keeps_small_images_large_and_is_torchvisions_for_large_ones() -> None:
    small = build_model("resnet50", num_classes=100, input_shape=CIFAR)
    theirs = build_model("torchvision:resnet50", num_classes=100, input_shape=CIFAR)
    large = build_model("resnet50", num_classes=100, input_shape=(3, 224, 224))
    stems = 64 * 3 * 7 * 7 - 64 * 3 * 3 * 3
    assert parameters(theirs) - parameters(small) == stems
    assert parameters(large) == parameters(theirs)
    assert set(small.state_dict()) == set(theirs.state_dict())
    assert isinstance(small, nn.Sequential)
    assert small[:-3](torch.zeros(1, *CIFAR)).shape[-2:] == (4, 4)  # 32 pixels halved three times


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("resnet56", "resnet110")])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_our_models_train_on_small_images(name: str, shape: tuple[int, int, int]) -> None:
    model = build_model(name, num_classes=7, input_shape=shape)
    assert isinstance(model, nn.Sequential)
    assert model.training
    outputs = model(torch.randn(2, *shape))
    assert outputs.shape == (2, 7)
    outputs.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_building_leaves_the_running_statistics_untouched() -> None:
    model = build_model("resnet20", num_classes=10, input_shape=CIFAR)
    assert all(int(b) == 0 for name, b in model.named_buffers() if name.endswith("num_batches_tracked"))


def test_weights_come_from_torchs_generator() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build_model("cnn", num_classes=10, input_shape=CIFAR).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_the_shortcut_takes_every_second_pixel_and_zeros() -> None:
    block = BasicBlock(2, 5, stride=2).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(1, 2, 4, 4)
    y = block(x)
    assert torch.equal(y[:, :2], x[:, :, ::2, ::2])
    assert not y[:, 2:].any()


def test_alexnet_has_three_convolutions_and_two_full_layers_that_hold_most_parameters() -> None:
    model = build_model("alexnet-small", num_classes=10, input_shape=CIFAR)
    weighted = [m for m in model.children() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [type(m) for m in weighted] == [nn.Conv2d] * 3 + [nn.Linear] * 2
    full = sum(parameters(m) for m in weighted[3:])
    assert full / parameters(model) > 0.8


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet"])
def test_any_other_name_is_torchvisions(name: str) -> None:
    model = build_model(name, num_classes=6, input_shape=(3, 96, 96))
    assert type(model).__module__.startswith("torchvision.")
    assert model(torch.zeros(2, 3, 96, 96)).shape == (2, 6)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet21", CIFAR, "unknown model 'resnet21': did you mean .*resnet20"),
        ("zzzz", CIFAR, "unknown model 'zzzz': choose one of mlp, cnn"),
        ("torchvision:cnn", CIFAR, "unknown model 'torchvision:cnn'"),
        ("alexnet-small", (1, 8, 8), "'alexnet-small' does not fit images of 1x8x8"),
        ("resnet18", (1, 8, 8), "'resnet18' does not fit images of 1x8x8"),
        ("cnn", (3, 0, 8), r"input_shape=\(3, 0, 8\)"),
    ],
)
def test_what_cannot_be_built_is_one_line_with_a_way_out(name: str, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(name, num_classes=10, input_shape=shape)
    assert "\n" not in str(caught.value)
