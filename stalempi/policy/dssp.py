"""Decides when a worker may go on under DSSP: its threshold is chosen anew, between two, at each push."""

from __future__ import annotations

from typing import Any, ClassVar

from stalempi.errors import ConfigError
from stalempi.policy.base import Decision, Leave, Push
from stalempi.policy.checks import check_number, check_whole
from stalempi.policy.controllers import Controller
from stalempi.policy.dyn import DynController, MomentController
from stalempi.policy.narrowing import Narrowing
from stalempi.policy.paper import PaperCapped, PaperController
from stalempi.policy.predictors import make_predictor
from stalempi.policy.ssp import Gated

__all__ = ["CONTROLLERS", "DSSP"]

_PREDICTING: dict[str, type[MomentController]] = {kind.name: kind for kind in (DynController, MomentController)}
_PAPER: dict[str, type[PaperController]] = {kind.name: kind for kind in (PaperController, PaperCapped)}
CONTROLLERS = (*_PREDICTING, *_PAPER)


class DSSP(Gated):
    """Dynamic stale synchronous parallel: SSP with a threshold in [lower, upper] that a controller chooses.

    Args:
        lower, upper: s_L and s_U, whole numbers, 0 <= lower <= upper.
        controller: "dyn" (default), "moment" (dyn without hindsight), "paper-capped" or "paper" (uncapped; warns).
        predictor: "last", "ema[:b]" (default, b = 0.7) or "mean-std[:z]"; for dyn and moment.
        eps: share of the worker's own interval that it may be predicted to wait (default 0.005); for dyn and moment.
        narrow: (begin, end) in pushes of all workers: upper comes down to lower between them; not for "paper".

    Source: Algorithms 1 and 2 of the paper for the paper controllers (see `paper.py` for the lines), papers.md 1.7 and
    1.8 for the others.
    """

    name: ClassVar[str] = "dssp"

    def __init__(
        self,
        lower: int,
        upper: int,
        *,
        controller: str = "dyn",
        predictor: str | None = None,
        eps: float | None = None,
        narrow: tuple[int, int] | None = None,
    ) -> None:
        self.lower = check_whole("lower", lower)
        self.upper = check_whole("upper", upper)
        if lower > upper:
            raise ConfigError(f"lower must not be above upper, got lower={lower} and upper={upper}")
        if narrow is not None and controller == PaperController.name:
            raise ConfigError("controller paper has no bound to narrow; use paper-capped or dyn")
        self.controller = _make_controller(controller, lower, upper, predictor=predictor, eps=eps)
        self.narrowing = None if narrow is None else Narrowing(*narrow)

    @property
    def bound(self) -> int | None:
        """s_U; None with the uncapped paper controller."""
        return self.controller.bound

    def options(self) -> dict[str, int | float | str]:
        """Returns `lower`, `upper`, `controller`, and of the rest what applies."""
        given: dict[str, int | float | str] = {"lower": self.lower, "upper": self.upper}
        given["controller"] = self.controller.name
        if isinstance(self.controller, MomentController):
            given |= {"predictor": self.controller.predictor, "eps": self.controller.eps}
        if self.narrowing is not None:
            given["narrow"] = f"{self.narrowing.begin}:{self.narrowing.end}"
        return given

    def _begin(self, num_workers: int, now: float) -> None:
        super()._begin(num_workers, now)
        self.controller.start(self.clocks, now)

    def _state(self, now: float) -> dict[str, Any]:
        return {**super()._state(now), "controller": self.controller.state(now)}

    def _load_state(self, state: dict[str, Any], now: float) -> None:
        super()._load_state(state, now)
        self.controller.load_state(state["controller"], now)

    def let_run_ahead(self) -> None:
        """Takes the iteration that is begun early out of every threshold; not with a controller that gives credit."""
        if isinstance(self.controller, PaperController):
            raise ConfigError(
                f"run-ahead: controller {self.controller.name} gives credit by the gap at the release: take dyn"
            )
        super().let_run_ahead()

    def _least_threshold(self) -> int:
        return self.lower

    def _threshold(self, event: Push) -> int:
        chosen = self.controller.threshold(event.worker, event.now)
        if self.narrowing is None:
            return chosen
        return min(chosen, self.narrowing.upper_at(self.clocks.total, lower=self.lower, upper=self.upper))

    def _left(self, event: Leave) -> list[Decision]:
        self.controller.left(event.worker, event.now)
        return super()._left(event)

    def _on_release(self, worker: int, now: float) -> None:
        self.controller.released(worker, now)


def _make_controller(name: str, lower: int, upper: int, *, predictor: str | None, eps: float | None) -> Controller:
    if name in _PREDICTING:
        word = "ema" if predictor is None else predictor
        make_predictor(word)
        share = check_number("eps", 0.005 if eps is None else eps)
        return _PREDICTING[name](lower, upper, eps=share, predictor=word)
    if name not in _PAPER:
        raise ConfigError(f"controller must be one of {', '.join(CONTROLLERS)}, got {name!r}")
    for option, value in (("predictor", predictor), ("eps", eps)):
        if value is not None:
            raise ConfigError(f"controller {name} has no option {option}; dyn and moment have")
    return _PAPER[name](lower, upper)
