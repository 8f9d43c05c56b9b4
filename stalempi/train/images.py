"""Holds labelled images in memory as bytes and hands out normalised batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from stalempi.train.augment import CropFlip, keyed_draws, random_draws

__all__ = ["Scale", "TensorImages"]


@dataclass(frozen=True)
class Scale:
    """Normalises bytes to (value - mean) / std by channel; both in the unit of the bytes."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, images: Tensor) -> Scale:
        """Measures uint8 images (N, C, H, W); a channel that is constant is only shifted."""
        values = torch.arange(256, dtype=torch.float64)
        means, stds = [], []
        for channel in images.unbind(1):
            share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
            mean = float(share @ values)
            variance = float(share @ (values - mean) ** 2)
            means.append(mean)
            stds.append(variance**0.5 or 1.0)
        return cls(tuple(means), tuple(stds))

    def __call__(self, images: Tensor) -> Tensor:
        """Turns uint8 images (..., C, H, W) into float32."""
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return images.to(torch.float32).sub_(mean).div_(std)


@dataclass(frozen=True, eq=False)
class TensorImages(Dataset[tuple[Tensor, int]]):
    """Images in memory: `images` uint8 (N, C, H, W), `labels` int64 (N,).

    Works with any torch DataLoader; that of `stalempi.train.loader` fetches whole batches and has nothing to collate.
    """

    images: Tensor
    labels: Tensor
    scale: Scale
    augment: CropFlip | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        images, labels = self.batch([index])
        return images[0], int(labels[0])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """Samples `indices` in the form that torch's own DataLoader collates."""
        images, labels = self.batch(indices)
        return list(zip(images, labels.tolist(), strict=True))

    def batch(self, indices: Sequence[int], *, epoch: int | None = None) -> tuple[Tensor, Tensor]:
        """Samples `indices`, see `Samples.batch`."""
        at = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images[at]
        if self.augment is not None:
            draws = random_draws(len(at)) if epoch is None else keyed_draws(self.seed, epoch, len(self))[at]
            images = self.augment(images, draws)
        return self.scale(images), self.labels[at]

    def plain(self) -> TensorImages:
        """Makes the same data set without augmentation; the images are shared."""
        return replace(self, augment=None)
