"""Clocks count pushes; the least and the largest count are those of the workers still in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.errors import ProtocolError
from stalempi.policy import Clocks


def test_the_gap_is_the_count_minus_the_least_count() -> None:
    clocks = Clocks(2)
    clocks.push(0)
    clocks.push(0)
    assert (clocks.least, clocks.most, clocks.gap(0), clocks.gap(1)) == (0, 2, 2, 0)


def test_a_worker_that_leaves_no_longer_holds_the_least_count() -> None:
    clocks = Clocks(3)
    for worker in (0, 0, 0, 1, 1):
        clocks.push(worker)
    clocks.leave(2)
    assert clocks.least == 2
    assert list(clocks.workers()) == [0, 1]


@pytest.mark.parametrize("worker", [-1, 2, 1])
def test_a_stranger_or_a_worker_that_has_left_is_refused_and_nothing_changes(worker: int) -> None:
    clocks = Clocks(2)
    clocks.leave(1)
    before = (list(clocks.counts), list(clocks.active), clocks.least, clocks.total)
    for move in (clocks.push, clocks.leave):
        with pytest.raises(ProtocolError, match=f"worker {worker} is not"):
            move(worker)
    assert (clocks.counts, clocks.active, clocks.least, clocks.total) == before


@given(moves=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["push"] * 9 + ["leave"])), max_size=60))
def test_least_and_most_equal_a_plain_count(moves: list[tuple[int, str]]) -> None:
    clocks = Clocks(5)
    counts = dict.fromkeys(range(5), 0)
    for worker, move in moves:
        if worker not in counts:
            continue
        if move == "push":
            clocks.push(worker)
            counts[worker] += 1
        else:
            clocks.leave(worker)
            del counts[worker]
        if counts:
            assert (clocks.least, clocks.most) == (min(counts.values()), max(counts.values()))
        assert clocks.num_active == len(counts)
