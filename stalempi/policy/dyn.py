"""Chooses the smallest threshold whose predicted wait is small: for the moment, and in the long run."""

# Letters: s_L lower, s_U upper, p the worker that has just pushed, I_p its predicted service time (s), m the least
# count.

from __future__ import annotations

from typing import Any, ClassVar

from stalempi.policy.clocks import Clocks
from stalempi.policy.controllers import Controller
from stalempi.policy.forecast import Forecast
from stalempi.policy.replay import Replay

__all__ = ["DynController", "MomentController"]

_MEMORY_ROWS = 256
_MOST_REPLAYS = 16


class MomentController(Controller):
    """The recommended rule of papers.md 1.8: the smallest s in [s_L, s_U] whose predicted wait is at most eps * I_p.

    Args:
        lower, upper: s_L and s_U.
        eps: the share of the worker's own interval that it may be made to wait.
        predictor: the word of `make_predictor`.

    It looks at one moment. Under any s >= gap worker p goes on now and is asked again at its next push. Under s < gap
    it stops now until m has risen by gap - s, so it stops only where that is predicted within eps * I_p. A second rise
    would take another whole interval of the worker that makes the first, so s = gap - 1 is the smallest that can
    qualify (unless that worker is 1 / eps times faster than p).

    Predicted pushes of all workers enter, by service time (papers.md 1.4 item 8). Alone it lets gaps grow to s_U where
    a worker is slow for good, for nothing; `dyn` mends that.
    """

    name: ClassVar[str] = "moment"

    def __init__(self, lower: int, upper: int, *, eps: float, predictor: str) -> None:
        super().__init__(lower, upper)
        self.eps = eps
        self.predictor = predictor
        self.ceiling = upper

    def start(self, clocks: Clocks, now: float) -> None:
        """Begins a run with nothing predicted."""
        self.clocks = clocks
        self._forecast = Forecast(clocks, predictor=self.predictor, now=now)

    def released(self, worker: int, now: float) -> None:
        """Predicts the next push of `worker`."""
        self._forecast.released(worker, now)

    def state(self, now: float) -> dict[str, Any]:
        """Returns the ceiling and what is predicted."""
        return {"ceiling": self.ceiling, "forecast": self._forecast.state(now)}

    def load_state(self, state: dict[str, Any], now: float) -> None:
        """Goes on with the ceiling and the predictions of a `state`."""
        self.ceiling = int(state["ceiling"])
        self._forecast.load_state(state["forecast"], now)

    def threshold(self, worker: int, now: float) -> int:
        """Returns gap - 1 where stopping now is predicted to cost next to nothing, else the ceiling."""
        self._measure(worker, self._forecast.pushed(worker, now))
        gap = self.clocks.gap(worker)
        if not self.lower < gap <= self.ceiling:
            return self.ceiling
        allowed = self.eps * (self._forecast.interval(worker) or 0.0)
        return gap - 1 if self._forecast.until_rise(now) <= allowed else self.ceiling

    def _measure(self, worker: int, service: float) -> None:
        """Takes a service time (s); for a controller that learns its ceiling."""


class DynController(MomentController):
    """The moment's rule under a ceiling in [s_L, s_U] that hindsight sets; the default.

    The ceiling is the smallest s whose avoidable wait, replayed over the recent service times of the whole group, is at
    most eps of the time (see `Replay`). It begins at s_L. So the threshold rises while slowness moves around, which
    slack can hide, and returns to s_L where it would buy nothing: no slowness, or a worker slow for good.
    """

    name: ClassVar[str] = "dyn"

    def start(self, clocks: Clocks, now: float) -> None:
        """Begins a run at s_L with no hindsight."""
        super().start(clocks, now)
        every = -(-(self.upper - self.lower + 1) // _MOST_REPLAYS)
        thresholds = [*range(self.lower, self.upper, every), self.upper]
        self._replay = Replay(len(clocks.counts), thresholds, memory=_MEMORY_ROWS)
        self.ceiling = self.lower

    def state(self, now: float) -> dict[str, Any]:
        """Returns also what hindsight rests on."""
        return super().state(now) | {"replay": self._replay.state()}

    def load_state(self, state: dict[str, Any], now: float) -> None:
        """Goes on with the predictions and the hindsight of a `state`."""
        super().load_state(state, now)
        self._replay.load_state(state["replay"])

    def left(self, worker: int, now: float) -> None:
        """Goes on without `worker`."""
        self._replay.leave(worker)
        self._look_back()

    def _measure(self, worker: int, service: float) -> None:
        self._replay.record(worker, service)
        self._look_back()

    def _look_back(self) -> None:
        if self._replay.advance(self.clocks.least):
            self.ceiling = self._replay.smallest(self.eps)
