"""The replay measures what each threshold gives away, from service times alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.policy import SSP
from stalempi.policy.replay import Replay, _Run

from .timing import drive

Row = list[float]


def replayed(rows: Sequence[Row], thresholds: Sequence[int], share: float) -> int:
    """Feeds whole rows and returns the smallest threshold within `share`."""
    replay = Replay(len(rows[0]), thresholds, memory=10**6)
    for least, row in enumerate(rows, start=1):
        for worker, service in enumerate(row):
            replay.record(worker, service)
        assert replay.advance(least)
    return replay.smallest(share)


@given(
    rows=st.lists(st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3), min_size=1, max_size=12),
    threshold=st.integers(0, 4),
)
def test_a_virtual_run_is_what_ssp_does_under_a_clock(rows: list[Row], threshold: int) -> None:
    """The recurrence T(p, k) = max(T(p, k-1), M(k-1-s)) + S(p, k) against the policy itself, event by event."""
    virtual = _Run(threshold, 3)
    complete = []
    now = 0.0
    for row in rows:
        now += virtual.row(row)
        complete.append(now)
    assert complete == pytest.approx(times_of_rows(rows, threshold))


def times_of_rows(rows: list[Row], threshold: int) -> list[float]:
    """Returns when SSP(threshold) completes each row, each worker leaving after its last."""
    times: list[float] = []
    policy = SSP(threshold)
    done = [0] * 3

    def service(worker: int, now: float) -> float | None:
        return rows[done[worker]][worker] if done[worker] < len(rows) else None

    for push in drive(policy, 3, service, until=float("inf")):
        done[push.worker] += 1
        if done[push.worker] == len(times) + 1 == min(done):
            times.append(push.now)
    return times


def test_alike_workers_lose_nothing_under_the_smallest_threshold() -> None:
    assert replayed([[1.0, 1.0]] * 50, range(1, 6), 0.0) == 1


def test_a_worker_that_is_slow_for_good_is_no_reason_to_raise_the_threshold() -> None:
    assert replayed([[1.0, 3.0]] * 50, range(1, 6), 0.0) == 1


def test_slowness_that_moves_around_is() -> None:
    turns = ([[1.0, 2.0]] * 12 + [[2.0, 1.0]] * 12) * 20
    assert replayed(turns, range(1, 16), 0.01) > 1
    assert replayed(turns, range(1, 16), 0.5) == 1


def test_a_worker_that_has_left_is_in_no_row_to_come() -> None:
    replay = Replay(2, (0, 1), memory=10)
    replay.record(0, 1.0)
    replay.record(0, 1.0)
    replay.leave(1)
    assert replay.advance(2)
    replay.leave(0)
    assert not replay.advance(2)
