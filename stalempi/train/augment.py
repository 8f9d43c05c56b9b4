"""Moves and mirrors whole batches of images at random, the same way wherever a sample is processed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stalempi.errors import ConfigError

__all__ = ["CropFlip", "keyed_draws", "random_draws"]

DRAWS = 3  # random numbers that one sample takes: vertical shift, horizontal shift, mirror


@lru_cache(maxsize=2)
def keyed_draws(seed: int, epoch: int, samples: int) -> Tensor:
    """Uniform numbers in [0, 1) for every sample of a data set in one epoch, float32 (samples, 3).

    They depend on the sample and not on who processes it, when, or in which batch. So N workers see what one process
    sees, and a resumed run sees what an unbroken one does. The table is cached: drawing it costs about 10 ns a sample.
    """
    return torch.from_numpy(np.random.default_rng([seed, epoch]).random((samples, DRAWS), dtype=np.float32))


def random_draws(samples: int) -> Tensor:
    """Uniform numbers in [0, 1) from torch's global generator, float32 (samples, 3)."""
    return torch.rand(samples, DRAWS)


@dataclass(frozen=True)
class CropFlip:
    """Pads each side with zeros, crops the old size at a random place, mirrors half of the images (He et al. 2016)."""

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ConfigError(f"padding={self.padding} is negative: give 0 for no crop, 4 for 32x32 images")

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Changes each image of (B, C, H, W), any dtype, as its row of `draws` (B, 3) says; a new tensor."""
        places = 2 * self.padding + 1
        # float32 rounds up at times: u * places may reach places
        row, column = (draws[:, :2] * places).long().clamp_(max=places - 1).unbind(1)
        height, width = images.shape[-2:]
        padded = F.pad(images, (self.padding,) * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (B, C, places, places, H, W)
        cropped = windows[torch.arange(len(images)), :, row, column]
        if not self.flip:
            return cropped
        mirrored = draws[:, 2] < 0.5
        cropped[mirrored] = cropped[mirrored].flip(-1)
        return cropped
