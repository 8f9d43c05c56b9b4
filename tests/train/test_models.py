"""Models have the published sizes, fit the images, and say so when they do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stalempi.errors import ConfigError
from stalempi.train.models import build_model
from stalempi.train.models.layers import BasicBlock
from stalempi.train.models.preact import PreActBottleneck

CIFAR = (3, 32, 32)
THEIRS = "torchvision:resnet50"


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def build_meta(name: str, shape: tuple[int, ...] = CIFAR, classes: int = 10) -> nn.Module:
    """Builds a model of which only the shapes are of interest: nothing is drawn."""
    with torch.device("meta"):
        return build_model(name, num_classes=classes, input_shape=shape)


@pytest.mark.parametrize(
    ("name", "million", "layers"),
    [
        # He et al. 2016, table 6
        ("resnet20", 0.27, 20),
        ("resnet32", 0.46, 32),
        ("resnet56", 0.85, 56),
        ("resnet110", 1.73, 110),
        # He et al. 2016, "Identity Mappings", table 3: 1.7M
        ("resnet164", 1.70, 164),
        ("resnet98", 1.53, 98),
        ("resnet11", 0.13, 11),
        # Xie et al. 2017, table 7
        ("resnext29_8x64d", 34.4, 29),
        ("resnext29_2x64d", 9.13, 29),
        ("vgg19-small", 20.56, 19),
    ],
)
def test_networks_for_small_images_have_the_published_size(name: str, million: float, layers: int) -> None:
    model = build_meta(name)
    assert parameters(model) / 1e6 == pytest.approx(million, abs=0.05 if million > 30 else 0.006)
    weighted = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    shortcuts = [m for key, m in model.named_modules() if "shortcut" in key or key.endswith("downsample.0")]
    assert len(weighted) - len(shortcuts) == layers


@pytest.mark.parametrize("name", ["resnet50", "resnet101"])
def test_resnets_keep_small_images_large_and_are_torchvisions_for_large_ones(name: str) -> None:
    small, large = build_meta(name), build_meta(name, (3, 224, 224))
    theirs = build_meta(f"torchvision:{name}", (3, 224, 224))
    assert parameters(theirs) - parameters(small) == 64 * 3 * 7 * 7 - 64 * 3 * 3 * 3
    sizes = {key: value.shape for key, value in theirs.state_dict().items()}
    assert {key: value.shape for key, value in large.state_dict().items()} == sizes
    assert isinstance(small, nn.Sequential)
    assert small[:-3](torch.zeros(1, *CIFAR, device="meta")).shape[-2:] == (4, 4)  # 32 pixels halved three times


def test_resnet50_computes_what_torchvisions_does() -> None:
    ours, theirs = (build_model(name, num_classes=5, input_shape=(3, 65, 65)) for name in ("resnet50", THEIRS))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, 65, 65)
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_preactivated_block_adds_to_the_untouched_input() -> None:
    block = PreActBottleneck(8, 2, stride=1)
    nn.init.zeros_(block.conv3.weight)
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(block(x), x)
    wider = PreActBottleneck(8, 4, stride=2)
    nn.init.zeros_(wider.conv3.weight)
    assert wider.shortcut is not None
    assert torch.equal(wider(x), wider.shortcut(nn.functional.relu(wider.bn1(x))))


# the others are these with more of the same blocks
TRAINED = ["mlp", "cnn", "alexnet-small", "resnet11", "resnet20", "resnext29_2x64d", "vgg19-small", "resnet50"]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_our_models_train_on_small_images(name: str, shape: tuple[int, int, int]) -> None:
    model = build_model(name, num_classes=7, input_shape=shape)
    assert isinstance(model, nn.Sequential)
    assert model.training
    outputs = model(torch.randn(2, *shape))
    assert outputs.shape == (2, 7)
    outputs.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    build_model(name, num_classes=7, input_shape=shape).load_state_dict(model.state_dict(), strict=True)


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
