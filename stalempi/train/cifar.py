"""Reads CIFAR-10 and CIFAR-100 through torchvision."""

from __future__ import annotations

from pathlib import Path

import torch
from torchvision.datasets import CIFAR10, CIFAR100

from stalempi.errors import ConfigError
from stalempi.train.augment import CropFlip
from stalempi.train.data import Data
from stalempi.train.images import Scale, TensorImages

__all__ = ["load_cifar"]


def load_cifar(name: str, root: Path, *, download: bool, seed: int) -> Data:
    """Loads `name` (cifar10 or cifar100) from `root`, where torchvision keeps its unpacked files.

    50,000 training images with random crop (padding 4) and mirror, 10,000 test images, all 3x32x32.
    Raises ConfigError if the files are missing or damaged, or if the download fails.
    """
    kind = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    try:
        train, test = (kind(root, train=is_train, download=download) for is_train in (True, False))
    except (RuntimeError, OSError) as failure:
        if download:
            reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
            raise ConfigError(f"cannot download {name} to {root}: {reason}") from failure
        raise ConfigError(
            f"no whole {name} in {root} (looked for {kind.base_folder}): ask for the download, or name its folder"
        ) from failure
    pictures, test_pictures = (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in (train, test))
    labels, test_labels = (torch.tensor(part.targets) for part in (train, test))
    scale = Scale.of(pictures)
    return Data(
        name=name,
        train=TensorImages(pictures, labels, scale, CropFlip(padding=4), seed),
        test=TensorImages(test_pictures, test_labels, scale),
        classes=tuple(train.classes),
        input_shape=(3, 32, 32),
    )
