"""Says what is measured of the model along the way, and how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from stalempi.errors import ConfigError
from stalempi.train.evaluate import Point

__all__ = ["Evaluation", "Every"]


@dataclass(frozen=True)
class Every:
    """How often something is due: every so many global `samples`, or `seconds`; neither is never."""

    samples: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str | int | None) -> Every:
        """Reads a number of samples, or of seconds as in "30s"; ConfigError otherwise."""
        if text is None:
            return cls()
        words = str(text).strip()
        try:
            found = cls(seconds=float(words[:-1])) if words.endswith("s") else cls(samples=int(words))
            if 0 < (found.samples or found.seconds or 0) < float("inf"):
                return found
        except ValueError:
            pass
        raise ConfigError(f"evaluate every {text!r}: give global samples as in 5000, or seconds as in 30s")

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds else str(self.samples) if self.samples else "never"


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
        self.measure, self.every = measure, Every.parse(every)
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
