"""Defines the pre-activation residual networks of the DSP paper's experiments (He et al. 2016, "Identity Mappings")."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from stalempi.train.models.layers import Conv, head, padded_shortcut
from stalempi.train.models.small import Shape

__all__ = ["preact_basic", "preact_bottleneck"]


class PreActBasic(nn.Module):
    """Two 3x3 convolutions, normalised and activated before each, beside a shortcut without parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = Conv(inputs, outputs, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = Conv(outputs, outputs, 3)
        self.stride, self.new_channels = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        y = self.conv1(F.relu(self.bn1(x)))
        y = self.conv2(F.relu(self.bn2(y)))
        return y + padded_shortcut(x, self.stride, self.new_channels)  # type: ignore[no-any-return]  # nn.Module's call


class PreActBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, normalised and activated before each.

    Where the shape changes, the shortcut is a 1x1 convolution of the activated input, else the input itself.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = Conv(inputs, width, 1)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = Conv(width, width, 3, stride=stride)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = Conv(width, outputs, 1)
        self.shortcut = Conv(inputs, outputs, 1, stride=stride) if inputs != outputs or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, 4 * width, H / stride, W / stride)."""
        active = F.relu(self.bn1(x))
        y = self.conv1(active)
        y = self.conv2(F.relu(self.bn2(y)))
        y = self.conv3(F.relu(self.bn3(y)))
        return y + (x if self.shortcut is None else self.shortcut(active))  # type: ignore[no-any-return]  # as above


def preact_basic(depth: int, num_classes: int, input_shape: Shape) -> nn.Sequential:
    """Pre-activation ResNet of 6n + 2 layers, of 3n basic blocks with 16, 32 and 64 channels."""
    n, rest = divmod(depth - 2, 6)
    assert rest == 0, depth
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = 16
    for group, width in enumerate((16, 32, 64), 1):
        for i in range(n):
            blocks[f"block{group}_{i}"] = PreActBasic(inputs, width, stride=2 if i == 0 and group > 1 else 1)
            inputs = width
    return _whole(blocks, 64, num_classes, input_shape)


def preact_bottleneck(depth: int, num_classes: int, input_shape: Shape) -> nn.Sequential:
    """Pre-activation ResNet of 9n + 2 layers, of 3n bottlenecks with 64, 128 and 256 channels."""
    n, rest = divmod(depth - 2, 9)
    assert rest == 0, depth
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = 16
    for group, width in enumerate((16, 32, 64), 1):
        for i in range(n):
            blocks[f"block{group}_{i}"] = PreActBottleneck(inputs, width, stride=2 if i == 0 and group > 1 else 1)
            inputs = 4 * width
    return _whole(blocks, 256, num_classes, input_shape)


def _whole(blocks: OrderedDict[str, nn.Module], width: int, num_classes: int, input_shape: Shape) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=Conv(input_shape[0], 16, 3))
    layers |= blocks
    layers |= OrderedDict(bn=nn.BatchNorm2d(width), relu=nn.ReLU())
    return nn.Sequential(layers | head(width, num_classes))
