"""The forecast says when the least count will rise, from the predicted pushes of the workers that hold it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.policy import Clocks
from stalempi.policy.forecast import Forecast


class Group:
    """Workers that are released at once after every push, with the forecast told of everything."""

    def __init__(self, num_workers: int) -> None:
        self.clocks = Clocks(num_workers)
        self.forecast = Forecast(self.clocks, predictor="last", now=0.0)
        self.released = [0.0] * num_workers
        self.service = [0.0] * num_workers
        for worker in range(num_workers):
            self.forecast.released(worker, 0.0)

    def push(self, worker: int, now: float) -> None:
        self.clocks.push(worker)
        self.service[worker] = self.forecast.pushed(worker, now)
        self.released[worker] = now
        self.forecast.released(worker, now)

    def plain_forecast(self, now: float) -> float:
        """Asks every worker at the least count: time to its predicted push, or as long again as it is overdue."""
        due = [
            self.released[worker] + self.service[worker] - now
            for worker in self.clocks.workers()
            if self.clocks.counts[worker] == self.clocks.least
        ]
        return max(abs(seconds) for seconds in due)


def test_the_least_count_rises_with_the_last_push_that_is_due() -> None:
    group = Group(3)
    for worker, now in ((0, 1.0), (1, 2.0), (2, 4.0)):
        group.push(worker, now)
    group.push(0, 4.5)
    assert group.forecast.until_rise(4.5) == pytest.approx(4.0 + 4.0 - 4.5)


def test_a_worker_that_is_overdue_is_not_about_to_push() -> None:
    group = Group(2)
    group.push(0, 1.0)
    group.push(1, 1.0)
    group.push(0, 2.0)
    assert group.forecast.until_rise(2.0) == pytest.approx(0.0)
    assert group.forecast.until_rise(5.0) == pytest.approx(3.0)


def test_the_service_time_does_not_count_the_time_blocked() -> None:
    group = Group(1)
    group.clocks.push(0)
    assert group.forecast.pushed(0, 2.0) == 2.0
    group.forecast.released(0, 10.0)
    group.clocks.push(0)
    assert group.forecast.pushed(0, 11.0) == 1.0
    assert group.forecast.interval(0) == 1.0


moves = st.tuples(st.integers(0, 4), st.floats(0.01, 5.0), st.integers(0, 12))


@given(history=st.lists(moves, max_size=80))
def test_the_heaps_answer_as_a_plain_walk_over_all_workers(history: list[tuple[int, float, int]]) -> None:
    group = Group(5)
    now = 0.0
    for worker, wait, leave in history:
        now += wait
        if not group.clocks.is_active(worker):
            continue
        if leave == 0 and group.clocks.num_active > 1:
            group.clocks.leave(worker)
        else:
            group.push(worker, now)
        assert group.forecast.until_rise(now) == pytest.approx(group.plain_forecast(now))
