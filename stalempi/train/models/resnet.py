"""Defines the residual networks: He et al.'s for small images, ResNeXt-29, and ResNet-50 and 101."""

from __future__ import annotations

from torch import nn

from stalempi.train.models.layers import BasicBlock, Bottleneck, Conv, head, stem
from stalempi.train.models.small import Shape

__all__ = ["SMALL", "cifar_resnet", "resnet", "resnext29"]

SMALL = 64  # pixels; up to here resnet50 and 101 keep the full resolution in their first layers


def cifar_resnet(depth: int, num_classes: int, input_shape: Shape) -> nn.Sequential:
    """ResNet of 6n + 2 layers for small images: 3n blocks with 16, 32 and 64 channels (He et al. 2016, section 4.2)."""
    n, rest = divmod(depth - 2, 6)
    assert rest == 0, depth
    layers = stem(input_shape[0], 16)
    inputs = 16
    for group, outputs in enumerate((16, 32, 64), 1):
        for i in range(n):
            layers[f"block{group}_{i}"] = BasicBlock(inputs, outputs, stride=2 if i == 0 and group > 1 else 1)
            inputs = outputs
    return nn.Sequential(layers | head(64, num_classes))


def resnext29(cardinality: int, num_classes: int, input_shape: Shape) -> nn.Sequential:
    """ResNeXt-29 (cardinality x 64d) for small images: 3 groups of 3 blocks (Xie et al. 2017, section 5.3)."""
    layers = stem(input_shape[0], 64)
    inputs = 64
    for group, width in enumerate((64, 128, 256), 1):
        for i in range(3):
            layers[f"block{group}_{i}"] = Bottleneck(
                inputs,
                width * cardinality,
                4 * width,
                stride=2 if i == 0 and group > 1 else 1,
                groups=cardinality,
            )
            inputs = 4 * width
    return nn.Sequential(layers | head(1024, num_classes))


def resnet(counts: tuple[int, ...], num_classes: int, input_shape: Shape) -> nn.Sequential:
    """ResNet of `counts` bottlenecks per group: (3, 4, 6, 3) is ResNet-50, (3, 4, 23, 3) is ResNet-101.

    Parameters are named as torchvision's, and above 64 pixels a side it computes what torchvision's does. Up to 64 the
    first layer is a 3x3 convolution of stride 1, without max-pooling.
    """
    layers = stem(input_shape[0], 64)
    if max(input_shape[1:]) > SMALL:
        layers["conv1"] = Conv(input_shape[0], 64, 7, stride=2)
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    inputs = 64
    for group, (count, width) in enumerate(zip(counts, (64, 128, 256, 512), strict=True), 1):
        blocks = []
        for i in range(count):
            blocks.append(Bottleneck(inputs, width, 4 * width, stride=2 if i == 0 and group > 1 else 1))
            inputs = 4 * width
        layers[f"layer{group}"] = nn.Sequential(*blocks)
    return nn.Sequential(layers | head(inputs, num_classes))
