"""The index algebra of DSP (Eq. 6): what is valid, what is wrong with the rest, and what is nearest."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.errors import ConfigError
from stalempi.pipeline.queues import check_queues, gradient_queues, locks, nearest_queues
from stalempi.pipeline.schedules import DSP

lengths = st.lists(st.integers(-2, 6), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("p", "m", "q"),
    [
        ((1, 1, 0), (4, 2, 0), (1, 1)),
        ((2, 2, 0), (6, 3, 0), (1, 1)),
        ((5, 5, 0), (14, 7, 0), (2, 2)),
        ((0, 0, 0), (2, 1, 0), (1, 1)),  # FR
        ((0, 0), (0, 0), (0,)),  # BP
        ((0,), (0,), ()),
        ((1, 1, 0), (5, 3, 1), (1, 1)),  # m_{K-1} may be above 0
    ],
)
def test_the_published_configurations_are_valid_and_have_their_gradient_queues(
    p: tuple[int, ...], m: tuple[int, ...], q: tuple[int, ...]
) -> None:
    check_queues(p, m)
    assert gradient_queues(p, m) == q
    assert nearest_queues(p, m) == (p, m)


@pytest.mark.parametrize(
    ("p", "m", "says"),
    [
        ((1, 0), (4, 2, 0), "p has 2 lengths and m has 3, one a block is needed"),
        ((1, 1, 0, 0), (4, 2, 0), "p has 4 lengths and m has 3"),
        ((), (1, 0), "p has 0 lengths and m has 2"),
        ((1, 1, 1), (4, 2, 0), "p_2=1, but the last block hands its output to nobody"),
        ((1, -1, 0), (4, 2, 0), "p_1=-1 is negative"),
        ((0, 0), (1, -1), "m_1=-1 is negative"),
        ((1, 1, 0), (2, 2, 0), "q_1 = m_0 - p_0 - m_1 = -1 is negative"),
        ((1, 3, 0), (4, 2, 0), "q_2 = m_1 - p_1 - m_2 = -1 is negative"),
    ],
)
def test_each_constraint_says_what_is_broken_and_what_would_run(
    p: tuple[int, ...], m: tuple[int, ...], says: str
) -> None:
    for refuse in (check_queues, DSP):
        with pytest.raises(ConfigError, match=re.escape(says)) as error:
            refuse(p, m)
        found = re.search(r"the nearest that runs is p=([\d,]+) m=([\d,]+)$", str(error.value))
        assert found
        good = [tuple(map(int, group.split(","))) for group in found.groups()]
        check_queues(*good)


def test_no_queues_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="m is empty"):
        check_queues((), ())


@given(lengths, lengths, st.integers(0, 2))
def test_the_nearest_is_valid_and_keeps_what_it_can(p: list[int], m: list[int], least: int) -> None:
    new_p, new_m = nearest_queues(p, m, least=least)
    check_queues(new_p, new_m)
    assert all(q >= least for q in gradient_queues(new_p, new_m))
    assert all(new >= old for new, old in zip(new_m, m, strict=True))
    assert new_p[:-1] == tuple(max(0, value) for value in [*p, *[0] * len(m)][: len(m) - 1])
    assert nearest_queues(new_p, new_m, least=least) == (new_p, new_m)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_nearest_is_the_least_change_of_all_that_are_valid(blocks: int) -> None:
    for p in itertools.product(range(2), repeat=blocks - 1):
        for m in itertools.product(range(-1, 3), repeat=blocks):
            _, found = nearest_queues((*p, 0), m)
            for other in itertools.product(range(5), repeat=blocks):
                if (
                    all(a >= b for a, b in zip(other, m, strict=True))
                    and min([*gradient_queues((*p, 0), other), 0]) == 0
                ):
                    assert sum(found) <= sum(other), (p, m, found, other)


def test_locks_are_named_link_by_link() -> None:
    assert locks((1, 1, 0), (4, 2, 0)) == []
    assert locks((0, 1, 0), (3, 2, 0)) == ["block 0 and block 1 work on the same batch in the same step (p_0=0)"]
    assert locks((1, 1, 0), (3, 2, 0)) == [
        "block 0 waits for the error gradient that block 1 computes in the same step (q_1=0)"
    ]
    assert len(locks((0, 0, 0), (0, 0, 0))) == 4
    assert locks((0,), (0,)) == []
