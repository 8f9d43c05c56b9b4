"""Defines VGG-19 for small images."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from stalempi.train.models.layers import Conv
from stalempi.train.models.small import Shape

__all__ = ["vgg19_small"]

WIDTHS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels and convolutions of each group


def vgg19_small(num_classes: int, input_shape: Shape) -> nn.Sequential:
    """VGG-19 with batch normalisation: 16 convolutions of the paper's widths and 3 full layers of 512 units, not 4096.

    Each of the five groups (Simonyan and Zisserman 2015, table 1, E) ends in a max-pooling by two, rounded up, so that
    any image fits.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = input_shape[0]
    for group, (width, count) in enumerate(WIDTHS, 1):
        for i in range(1, count + 1):
            layers[f"conv{group}_{i}"] = Conv(inputs, width, 3)
            layers[f"bn{group}_{i}"] = nn.BatchNorm2d(width)
            layers[f"relu{group}_{i}"] = nn.ReLU()
            inputs = width
        layers[f"pool{group}"] = nn.MaxPool2d(2, ceil_mode=True)
    layers |= OrderedDict(
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc1=nn.Linear(512, 512),
        relu6=nn.ReLU(),
        fc2=nn.Linear(512, 512),
        relu7=nn.ReLU(),
        fc3=nn.Linear(512, num_classes),
    )
    return nn.Sequential(layers)
