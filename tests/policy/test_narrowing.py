"""A narrowing brings the upper threshold down to the lower one as the pushes add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stalempi.policy import DSSP
from stalempi.policy.narrowing import Narrowing

from .watched import Watch


def test_the_upper_threshold_falls_in_a_straight_line_between_begin_and_end() -> None:
    narrowing = Narrowing(100, 200)
    thresholds = [narrowing.upper_at(pushes, lower=3, upper=13) for pushes in (0, 100, 101, 150, 199, 200, 999)]
    assert thresholds == [13, 13, 13, 8, 4, 3, 3]


@given(begin=st.integers(0, 50), length=st.integers(0, 50), lower=st.integers(0, 5), extra=st.integers(0, 9))
def test_it_never_rises_and_stays_between_the_two(begin: int, length: int, lower: int, extra: int) -> None:
    narrowing = Narrowing(begin, begin + length)
    line = [narrowing.upper_at(pushes, lower=lower, upper=lower + extra) for pushes in range(110)]
    assert line == sorted(line, reverse=True)
    assert (line[0] == lower + extra) or begin + length == 0
    assert line[-1] == lower


def test_early_a_worker_may_be_far_ahead_and_late_it_may_not(watch: Watch) -> None:
    run = watch(DSSP(0, 3, controller="moment", eps=0.0, narrow=(4, 4)), 2)
    assert [run.goes_on(0) for _ in range(3)] == [True, True, True]
    for _ in range(3):
        run.push(1)
    assert not run.goes_on(0)
