"""Keeps what the model was like along the way, to be tested once training is over."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stalempi.policy import Decision, Event
from stalempi.simulate.learning import Point
from stalempi.train.data import Samples
from stalempi.train.evaluate import evaluate
from stalempi.train.optimizer import DistributedOptimizer

__all__ = ["Gallery"]


class Gallery:
    """Takes a snapshot of the server's model every so many global samples; fits the server's `observe`.

    Args:
        optimizer: the server's.
        every: global samples between two snapshots; None: none are taken.

    A snapshot costs one copy of the model, in time and in memory.
    """

    def __init__(self, optimizer: DistributedOptimizer, every: int | None) -> None:
        self._optimizer, self._every = optimizer, every
        self._due = every
        self._pictures: list[tuple[float, int, dict[str, Tensor]]] = []

    def __call__(self, event: Event, decisions: list[Decision]) -> None:
        """Takes a snapshot if it is time."""
        stats = self._optimizer.stats
        if self._every is not None and self._due is not None and stats.samples >= self._due:
            self._due = stats.samples + self._every
            self._pictures.append((event.now - stats.started, stats.samples, self._optimizer.snapshot()))

    def examine(self, model: nn.Module, images: Samples, device: torch.device) -> list[Point]:
        """Returns how good each snapshot is on `images`; `model` computes it and is afterwards what it was before."""
        final = {name: value.clone() for name, value in model.state_dict().items()}
        points = []
        for seconds, samples, state in self._pictures:
            model.load_state_dict(state)
            points.append(Point(seconds, samples, *evaluate(model, images, device=device)))
        model.load_state_dict(final)
        return points
