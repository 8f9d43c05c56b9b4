"""Defines the residual networks for small images."""

from __future__ import annotations

from collections import OrderedDict

import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from stalempi.train.models.small import Shape

__all__ = ["cifar_resnet", "resnet50_small"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters (He et al. 2016, section 4.2, option A).

    Where the block halves the image, the shortcut takes every second pixel and fills the new channels with zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.new_channels = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(y + shortcut)


def cifar_resnet(depth: int, num_classes: int, input_shape: Shape) -> nn.Sequential:
    """ResNet of 6n + 2 layers for small images: 3n blocks with 16, 32 and 64 channels (He et al. 2016, section 4.2)."""
    n, rest = divmod(depth - 2, 6)
    assert rest == 0, depth
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False), bn1=nn.BatchNorm2d(16), relu=nn.ReLU()
    )
    inputs = 16
    for group, outputs in enumerate((16, 32, 64), 1):
        for i in range(n):
            layers[f"block{group}_{i}"] = BasicBlock(inputs, outputs, stride=2 if i == 0 and group > 1 else 1)
            inputs = outputs
    layers |= OrderedDict(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(64, num_classes))
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet50_small(num_classes: int, input_shape: Shape) -> nn.Sequential:
    """ResNet-50 whose first layer is a 3x3 convolution of stride 1, without max-pooling, for images up to 64 pixels.

    Its parameters are named as torchvision's.
    """
    whole = torchvision.models.resnet50(weights=None, num_classes=num_classes)
    conv1 = nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv1.weight, mode="fan_out", nonlinearity="relu")
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=conv1, bn1=whole.bn1, relu=nn.ReLU())
    for name in ("layer1", "layer2", "layer3", "layer4", "avgpool"):
        layers[name] = getattr(whole, name)
    layers |= OrderedDict(flatten=nn.Flatten(), fc=whole.fc)
    return nn.Sequential(layers)
