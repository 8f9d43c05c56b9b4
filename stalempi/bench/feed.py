"""Deals the batches of a pipeline to the ranks that use them: data to the first block, labels to the last."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stalempi.errors import ConfigError
from stalempi.pipeline.pipeline import Pipeline
from stalempi.train.data import Data, Samples

__all__ = ["Feed"]

_TEST_BATCH = 256  # samples


class Feed:
    """The batches of a run, a function of the seed: each copy of the pipeline has its own share of every epoch.

    What is left of an epoch once its whole batches are dealt out is left out; which samples, differs by epoch.

    Args:
        data: for training and testing.
        batch_size: samples of a batch of one copy.
        replicas: copies of the pipeline.
        seed: of the order.

    Attributes:
        whole: samples that all copies take in together in one step.

    Raises ConfigError if an epoch has no whole batch.
    """

    def __init__(self, data: Data, batch_size: int, replicas: int, seed: int) -> None:
        self.data, self._size, self._replicas, self._seed = data, batch_size, replicas, seed
        self.whole = batch_size * replicas
        self._per_epoch = len(data.train) // self.whole
        if not self._per_epoch:
            raise ConfigError(
                f"--batch-size {batch_size} on {replicas} replica(s) is more than the {len(data.train)} samples to "
                "train on: make it smaller"
            )
        self._order: tuple[int, list[int]] = (-1, [])

    def count(self, samples: int | None, epochs: int) -> int:
        """Returns the batches of a run of so many global samples, or else epochs."""
        return math.ceil(samples / self.whole) if samples else epochs * self._per_epoch

    def training(self, batch: int, pipe: Pipeline) -> tuple[Tensor | None, Tensor | None]:
        """Returns data and labels of a batch where this rank uses them."""
        if not (pipe.is_first or pipe.is_last):
            return None, None
        epoch, place = divmod(batch, self._per_epoch)
        if self._order[0] != epoch:
            draws = torch.Generator().manual_seed((self._seed << 20) + epoch)
            self._order = epoch, torch.randperm(len(self.data.train), generator=draws).tolist()
        start = place * self.whole + pipe.replica * self._size
        return self.data.train.batch(self._order[1][start : start + self._size], epoch=epoch)

    def testing(self, pipe: Pipeline) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all batches of the test data; a block between the ends only needs their number."""
        test: Samples = self.data.test
        nothing = torch.empty(1)
        for start in range(0, len(test), _TEST_BATCH):
            used = pipe.is_first or pipe.is_last
            rows = range(start, min(start + _TEST_BATCH, len(test)))
            yield test.batch(rows) if used else (nothing, nothing)
