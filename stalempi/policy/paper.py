"""Gives credit as the DSSP paper's Algorithms 1 and 2 do, to the letter or under the hard cap."""

# The paper's letters (arXiv 1908.11848):
#   p       the worker that has just pushed         t_p     its count of pushes, c_p elsewhere in this package
#   s_L     lower                                   s_U     upper
#   r_p     credit: iterations p may run unchecked  r*      the credit that Algorithm 2 finds best
#   r_max   s_U - s_L                               A[i]    (latest, second latest) push time of worker i
#   I_i     A[i][0] - A[i][1], the interval of i    Sim_i   predicted push times of i

from __future__ import annotations

import warnings
from collections import deque
from typing import Any, ClassVar

from stalempi.policy.clocks import Clocks
from stalempi.policy.controllers import Controller

__all__ = ["PaperCapped", "PaperController", "UnboundedGapWarning", "best_credit"]

Pair = tuple[float | None, float | None]


class UnboundedGapWarning(UserWarning):
    """The policy as written in the paper does not bound the gap: its regret bound (Theorem 2) is not claimed."""


def best_credit(last_p: float, interval_p: float, next_slow: float, interval_slow: float, *, r_max: int) -> int:
    """Returns r* of Algorithm 2, lines 6-9: the r of the pair (k, r) minimising |Sim_slow[k] - Sim_p[r]|.

    Args:
        last_p, interval_p: A[p][0] and I_p in seconds; Sim_p[r] = last_p + r * interval_p.
        next_slow, interval_slow: A[slow][0] + I_slow and I_slow; Sim_slow[k] = next_slow + k * interval_slow.
        r_max: k and r are searched in [0, r_max].

    The paper leaves ties open: the smallest r wins.
    """

    def miss(r: int) -> float:
        sim_p = last_p + r * interval_p
        k = (sim_p - next_slow) / interval_slow if interval_slow > 0 else 0.0
        near = min(max(int(k), 0), r_max)
        return min(abs(next_slow + j * interval_slow - sim_p) for j in (near, min(near + 1, r_max)))

    return min(range(r_max + 1), key=miss)


class PaperController(Controller):
    """Algorithms 1 and 2 of the paper, uncapped: the gap has no bound, and the first `start` warns of that.

    Read to the letter, except where the text cannot be run as printed (papers.md 1.4):

    * lines 13-17 of Algorithm 1 fall through: after OK (14) the worker does not also wait (17);
    * the table A is kept on every push, not only inside the controller (Algorithm 2, lines 1-2);
    * with fewer than two pushes of p or of the slowest there is no interval, hence no credit;
    * "slowest" is the least t, ties to the push received first; p is fastest iff t_p is the
      largest t; line 8's ties go to the smallest r.

    The credit keeps its full value at the OK of line 14, as printed, so one grant of r gives r + 1 iterations. A worker
    without credit waits until its gap is s_L (line 17).
    """

    name: ClassVar[str] = "paper"

    def __init__(self, lower: int, upper: int) -> None:
        super().__init__(lower, upper)
        self._warned = False

    @property
    def bound(self) -> int | None:
        """None: nothing in the algorithm bounds the gap."""
        return None

    def start(self, clocks: Clocks, now: float) -> None:
        """Begins a run without credit and with an empty table A."""
        self.clocks = clocks
        self._credit = [0] * len(clocks.counts)
        self._pushes: list[Pair] = [(None, None)] * len(clocks.counts)
        # Who came to a count first pushed longest ago, so the slowest is the first in the line of the least count.
        self._arrivals = {0: deque(range(len(clocks.counts)))}
        self._forgotten = 0
        self._warn_once()

    def state(self, now: float) -> dict[str, Any]:
        """Returns the credits, the table A and who came to which count when."""
        return {
            "credit": list(self._credit),
            "ages": [[None if at is None else now - at for at in pair] for pair in self._pushes],
            "arrivals": [[count, list(line)] for count, line in self._arrivals.items()],
            "forgotten": self._forgotten,
        }

    def load_state(self, state: dict[str, Any], now: float) -> None:
        """Goes on with the credits, the table A and the lines of a `state`."""
        self._credit = [int(credit) for credit in state["credit"]]
        pairs = [[None if age is None else now - age for age in pair] for pair in state["ages"]]
        self._pushes = [(latest, before) for latest, before in pairs]
        self._arrivals = {int(count): deque(line) for count, line in state["arrivals"]}
        self._forgotten = int(state["forgotten"])

    def threshold(self, worker: int, now: float) -> int:
        """Returns the present gap where p has or gets credit (lines 3-5, 12-14), else s_L (lines 8, 17)."""
        self._pushes[worker] = (now, self._pushes[worker][0])
        self._arrive(worker)
        gap = self.clocks.gap(worker)
        if self._credit[worker] > 0:
            self._credit[worker] -= 1
            return max(gap, self.lower)
        if gap <= self.lower or self.clocks.counts[worker] < self.clocks.most:
            return self.lower
        grant = self._grant(worker)
        if grant == 0:
            return self.lower
        self._credit[worker] = self._credit_after(grant)
        return gap

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "DSSP as written in the paper has no bound on the gap; use controller='dyn' or 'paper-capped' for one",
                UnboundedGapWarning,
                stacklevel=5,
            )

    def _r_max(self, worker: int) -> int:
        return self.upper - self.lower

    def _credit_after(self, grant: int) -> int:
        return grant

    def _grant(self, worker: int) -> int:
        """Returns r* (Algorithm 2); 0 without two pushes of both workers."""
        slow = self._slowest()
        last_p, before_p = self._pushes[worker]
        last_slow, before_slow = self._pushes[slow]
        if last_p is None or before_p is None or last_slow is None or before_slow is None:
            return 0
        interval = last_slow - before_slow
        return best_credit(last_p, last_p - before_p, last_slow + interval, interval, r_max=self._r_max(worker))

    def _arrive(self, worker: int) -> None:
        """Lines `worker` up behind those who came to its count before it, and forgets the counts below m."""
        self._arrivals.setdefault(self.clocks.counts[worker], deque()).append(worker)
        while self._forgotten < self.clocks.least:
            self._arrivals.pop(self._forgotten, None)
            self._forgotten += 1

    def _slowest(self) -> int:
        counts, active, least = self.clocks.counts, self.clocks.active, self.clocks.least
        line = self._arrivals[least]
        while counts[line[0]] != least or not active[line[0]]:
            line.popleft()
        return line[0]


class PaperCapped(PaperController):
    """Algorithms 1 and 2 under the hard cap s_U, so that every run is an admissible SSP(s_U) run.

    Two decisions beyond the cap itself (papers.md 1.4 items 2 and 7, 1.7): the OK of line 14 spends one of the r*
    iterations granted (r_p = r* - 1), so that a grant gives what line 8 scored; and r* is searched up to
    min(r_max, s_U - gap + 1), so that a grant ends at the push at which the gap is s_U + 1 at most.
    """

    name: ClassVar[str] = "paper-capped"

    @property
    def bound(self) -> int:
        """s_U."""
        return self.upper

    def threshold(self, worker: int, now: float) -> int:
        """Returns the paper's threshold, never above s_U: credit is advice, the cap is law."""
        return min(super().threshold(worker, now), self.upper)

    def _warn_once(self) -> None:
        pass

    def _r_max(self, worker: int) -> int:
        return max(0, min(self.upper - self.lower, self.upper - self.clocks.gap(worker) + 1))

    def _credit_after(self, grant: int) -> int:
        return grant - 1
