"""Decides nothing: under ASP every worker goes on at once."""

from __future__ import annotations

from typing import ClassVar

from stalempi.policy.base import Apply, Decision, Leave, Policy, Push

__all__ = ["ASP"]


class ASP(Policy):
    """Asynchronous parallel: update and release on every push, with no bound on the gap.

    Source: papers.md section 2, the unified form with A = {W_s}.
    """

    name: ClassVar[str] = "asp"

    def options(self) -> dict[str, int | float | str]:
        """Returns nothing: ASP has no options."""
        return {}

    def let_run_ahead(self) -> None:
        """Lets every worker begin an iteration before its release; there is no bound that it could count in."""
        self.run_ahead = 1

    def _pushed(self, event: Push) -> list[Decision]:
        return [Apply((event.worker,)), *self._release((event.worker,), event.now)]

    def _left(self, event: Leave) -> list[Decision]:
        return []
