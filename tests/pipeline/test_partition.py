"""The cut is the best there is, against trying all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.errors import ConfigError
from stalempi.pipeline.partition import Memory, check_boundaries, partition

numbers = st.integers(0, 9)


def block_costs(costs: Sequence[float], cuts: Sequence[int], transfer: Sequence[float] = ()) -> list[float]:
    n = len(costs)
    free = transfer or [0] * n
    ends = pairwise([0, *cuts, n])
    return [sum(costs[i:j]) + (free[i] if i else 0) + (free[j] if j < n else 0) for i, j in ends]


def fits(memory: Memory, cuts: Sequence[int]) -> bool:
    ends = pairwise([0, *cuts, len(memory.units)])
    needs = [sum(memory.units[i:j]) + held * memory.inputs[i] for held, (i, j) in zip(memory.held, ends, strict=True)]
    return all(need <= limit for need, limit in zip(needs, memory.limits, strict=True))


def ways(units: int, blocks: int) -> Iterator[tuple[int, ...]]:
    return combinations(range(1, units), blocks - 1)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, list[int], Memory | None]:
    n = draw(st.integers(1, 8))
    k = draw(st.integers(1, n))

    def row(length: int, least: int = 0, most: int = 9) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=length, max_size=length))

    memory = Memory(row(n), row(n), row(k, most=3), row(k, 5, 40)) if draw(st.booleans()) else None
    return row(n), k, row(n) if draw(st.booleans()) else [], memory


@given(problems())
def test_it_is_the_best_of_all_cuts(problem: tuple[list[int], int, list[int], Memory | None]) -> None:
    costs, blocks, transfer, memory = problem
    allowed = [cuts for cuts in ways(len(costs), blocks) if memory is None or fits(memory, cuts)]
    if not allowed:
        with pytest.raises(ConfigError, match="no cut fits into memory"):
            partition(costs, blocks, transfer=transfer, memory=memory)
        return

    def rank(cuts: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        each = block_costs(costs, cuts, transfer)
        return max(each), sum(c * c for c in each), cuts

    assert partition(costs, blocks, transfer=transfer, memory=memory) == min(allowed, key=rank)


@pytest.mark.parametrize(
    ("costs", "blocks", "boundaries"),
    [
        ([1, 1, 1, 1], 2, (2,)),
        ([1, 1, 1, 9], 2, (3,)),
        ([9, 1, 1, 1, 9], 3, (1, 4)),
        ([5], 1, ()),
        ([0, 0, 0], 3, (1, 2)),
        ([8, 1, 1, 1], 3, (1, 2)),  # (1, 3) is as even: the earlier
    ],
)
def test_small_cases(costs: list[float], blocks: int, boundaries: tuple[int, ...]) -> None:
    assert partition(costs, blocks) == boundaries


def test_a_costly_boundary_is_not_cut() -> None:
    assert partition([2, 2, 2, 2], 2, transfer=[0, 0, 3, 0]) == (1,)


def test_memory_moves_the_boundary_even_where_only_stored_inputs_do_not_fit() -> None:
    inputs = [1, 4, 4, 1]
    memory = Memory(units=[1] * 4, inputs=inputs, held=(3, 3), limits=(7, 7))
    assert partition([1] * 4, 2, memory=memory) == (3,)


@pytest.mark.parametrize(
    ("costs", "blocks", "message"),
    [
        ([1, 1], 3, r"2 unit\(s\) cannot make 3 block\(s\): give 1 to 2"),
        ([1, 1], 0, "cannot make 0"),
        ([1, -1], 1, "costs: -1 is not a finite number"),
        ([1, float("nan")], 1, "costs: nan is not"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs: list[float], blocks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(costs, blocks)


def test_lists_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 transfer costs for 2 units"):
        partition([1, 1], 1, transfer=[1])
    with pytest.raises(ConfigError, match="2 units with 1 inputs, 1 blocks with 1 limits"):
        Memory([1, 1], [1], [1], [1])
    with pytest.raises(ConfigError, match="memory of 1 units and 1 blocks, not 2 and 1"):
        partition([1, 1], 1, memory=Memory([1], [1], [1], [1]))


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ((0, 2), r"boundaries \(0, 2\): a model of 4 unit\(s\) can be cut before units 1 to 3"),
        ((4,), "can be cut before"),
        ((2, 1), "increasing order"),
        ((2, 2), "each once"),
        ((1.5,), "give the indices"),
        ((True,), "give the indices"),
    ],
)
def test_boundaries_by_hand_are_checked(boundaries: Sequence[int], message: str) -> None:
    assert check_boundaries([1, 3], 4) == (1, 3)
    assert check_boundaries([], 1) == ()
    with pytest.raises(ConfigError, match=message):
        check_boundaries(boundaries, 4)
