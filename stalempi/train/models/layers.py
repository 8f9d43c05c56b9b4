"""Defines the parts that the networks share.

Every module here draws its own weights in `reset_parameters`, so that a part of a model built on the meta device can be
filled in later, alone, and be what it would have been (stalempi.pipeline.materialise).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BasicBlock", "Bottleneck", "Conv", "head", "stem"]


class Conv(nn.Conv2d):
    """A convolution without bias that keeps the image's size at stride 1; weights as He et al. 2015, by fan-out."""

    def __init__(self, inputs: int, outputs: int, size: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        """Draws the weights."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters (He et al. 2016, section 4.2, option A).

    Where the block halves the image, the shortcut takes every second pixel and fills the new channels with zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv(inputs, outputs, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = Conv(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.new_channels = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + padded_shortcut(x, self.stride, self.new_channels))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the middle one with the stride and in `groups`; named as torchvision's.

    The shortcut is a 1x1 convolution where the shape changes.
    """

    def __init__(self, inputs: int, width: int, outputs: int, *, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = Conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = Conv(width, width, 3, stride=stride, groups=groups)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = Conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(Conv(inputs, outputs, 1, stride=stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def padded_shortcut(x: Tensor, stride: int, new_channels: int) -> Tensor:
    """Takes every `stride`-th pixel of (B, C, H, W) and adds channels of zeros."""
    return F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, new_channels))


def stem(channels: int, width: int) -> OrderedDict[str, nn.Module]:
    """Makes the first layers of a network for small images: they keep its size."""
    return OrderedDict(conv1=Conv(channels, width, 3), bn1=nn.BatchNorm2d(width), relu=nn.ReLU())


def head(width: int, num_classes: int) -> OrderedDict[str, nn.Module]:
    """Makes the last layers: the mean over all pixels and a linear map of it."""
    return OrderedDict(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(width, num_classes))
