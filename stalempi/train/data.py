"""Says what a training run needs of a data set, whatever its samples are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Data", "Samples"]


class Samples(Protocol):
    """A map-style data set that can also fetch a whole batch at once."""

    def __len__(self) -> int:
        """Counts the samples."""

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Sample `index`: an image, float32 (C, H, W), and its label; or a text's tokens and those after them."""

    def batch(self, indices: Sequence[int], *, epoch: int | None = None) -> tuple[Tensor, Tensor]:
        """Samples `indices`: float32 (B, C, H, W) and int64 (B,) of images, int64 (B, T) twice of text.

        With an `epoch` the augmentation is a function of seed, epoch and sample, otherwise random.
        """

    def plain(self) -> Samples:
        """Makes the same data set without augmentation."""


@dataclass(frozen=True)
class Data:
    """A data set for training and testing; `input_shape` is (C, H, W) of an image, (T,) of a text."""

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]

    @property
    def num_classes(self) -> int:
        """How many classes there are; of text: tokens in the vocabulary."""
        return len(self.classes)

    def plain(self) -> Data:
        """Makes the same data without augmentation of the training samples."""
        return replace(self, train=self.train.plain())
