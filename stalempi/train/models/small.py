"""Defines the small networks: an MLP, a CNN for digits, and the DSSP paper's downsized AlexNet."""

from __future__ import annotations

import math

from torch import nn

__all__ = ["Shape", "alexnet_small", "cnn", "mlp"]

Shape = tuple[int, int, int]  # of one image: (C, H, W)


def mlp(num_classes: int, input_shape: Shape) -> nn.Sequential:
    """Two hidden layers of 128 units; any image size."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def cnn(num_classes: int, input_shape: Shape) -> nn.Sequential:
    """Two convolutions with batch normalisation and two fully connected layers; any image size.

    The feature map is pooled to 4x4 whatever the image, which for 8x8 digits is a max-pooling by two.
    """
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


def alexnet_small(num_classes: int, input_shape: Shape) -> nn.Sequential:
    """Downsized AlexNet of the DSSP paper (arXiv 1908.11848): 3 convolutional and 2 fully connected layers.

    The paper gives no widths. These are chosen so that, as in AlexNet, the fully connected layers hold most of the
    parameters: 0.60 of 0.72 million for 3x32x32 images. Each convolution is followed by AlexNet's overlapping pooling,
    so images must have at least 15 pixels a side.
    """
    channels, height, width = input_shape
    for _ in range(3):
        # at least 1, so that images that are too small fail at the pooling, where the reason is plain
        height, width = max((height - 3) // 2 + 1, 1), max((width - 3) // 2 + 1, 1)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Flatten(),
        nn.Linear(128 * height * width, 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )
