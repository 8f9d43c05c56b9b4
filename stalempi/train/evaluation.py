"""Says what is measured of the model along the way, and how often."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from stalempi.train.evaluate import Point
from stalempi.train.every import Every

__all__ = ["Evaluation"]


class Evaluation:
    """What is measured, and how often; every rank gives its optimizer one like it.

    Args:
        measure: returns accuracy and loss of a model; called on the evaluator, or on the server after training.
        every: global samples, or seconds as in "30s", between two snapshots; None: only the final model is measured.

    Attributes:
        curve: what was measured, by time; the last point is the final model.
        skipped: snapshots that were replaced by later ones while the evaluator was busy.
    """

    def __init__(self, measure: Callable[[nn.Module], tuple[float, float]], every: str | int | None = None) -> None:
        self.measure, self.every = measure, Every.parse(every, "evaluate")
        self.curve: list[Point] = []
        self.skipped = 0
        self._next = Every(self.every.samples, self.every.seconds)

    def is_due(self, seconds: float, samples: int) -> bool:
        """Returns whether a snapshot is due now; the next is then due so much later."""
        due = self._next
        if not ((due.samples and samples >= due.samples) or (due.seconds and seconds >= due.seconds)):
            return False
        every = self.every
        self._next = Every(every.samples and samples + every.samples, every.seconds and seconds + every.seconds)
        return True
