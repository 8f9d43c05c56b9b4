"""Queue lengths chosen from costs: the shortest that keep the busiest block busy."""

from __future__ import annotations

import random

import pytest

from stalempi.errors import ConfigError
from stalempi.pipeline.dryrun import BlockCost, LinkCost, play
from stalempi.pipeline.schedules import DSP
from stalempi.pipeline.sizing import size_queues, uniform_queues

EVEN = [BlockCost()] * 4


def test_equal_blocks_and_free_links_need_no_more_than_fr() -> None:
    assert size_queues(EVEN) == uniform_queues(4, 0, 1)
    assert size_queues(EVEN, overlaps=False) == DSP((0, 0, 0, 0), (3, 2, 1, 0), overlaps=False)


def test_a_link_that_costs_a_forward_needs_queues_both_ways() -> None:
    found = size_queues(EVEN, link=LinkCost(1.0))
    assert found == uniform_queues(4, 1, 1)
    assert play(uniform_queues(4, 0, 1), 4, 200, link=LinkCost(1.0)).period > 1.03 * 3
    far = size_queues(EVEN, link=LinkCost(10.0))
    assert far.m[0] > found.m[0]
    assert play(far, 4, 300, link=LinkCost(10.0)).period == pytest.approx(3.0, rel=0.03)


def test_stragglers_need_longer_queues_the_slower_they_are() -> None:
    draws = random.Random(1)
    picked = [draws.randrange(4) for _ in range(2000)]

    def chosen_for(factor: float) -> int:
        return size_queues(EVEN, slow=lambda block, step: 1 + factor * (picked[step] == block)).m[0]

    chosen = [chosen_for(factor) for factor in (0.0, 0.3, 1.0)]
    assert chosen[0] == 3
    assert chosen[0] < chosen[1] < chosen[2]


def test_it_is_the_busiest_block_that_counts() -> None:
    costs = [BlockCost(1, 1, 2), BlockCost(4, 4, 8), BlockCost(1, 1, 2)]
    found = size_queues(costs)
    assert play(found, 3, 200, costs=costs).period == pytest.approx(12.0, rel=0.03)
    assert found.m[0] <= 4
    # the last block never recomputes, and a recompute that is longer than the forward beside it shows
    assert play(size_queues([BlockCost(1, 9, 2)] * 2), 2, 99, costs=[BlockCost(1, 9, 2)] * 2).period == pytest.approx(
        11
    )


def test_one_block_has_no_queues() -> None:
    assert size_queues([BlockCost()]) == DSP((0,), (0,))


def test_what_cannot_be_had_is_said() -> None:
    with pytest.raises(ConfigError, match=r"queues of 2 batches a link leave .* where the busiest block needs 3 s"):
        size_queues(EVEN, link=LinkCost(50.0), longest=2)
    # a link that takes longer for a message than a block for a step
    with pytest.raises(ConfigError, match="leave 5 s a batch"):
        size_queues(EVEN, link=LinkCost(0.0, 1.0, 5), longest=6)
    with pytest.raises(ConfigError, match="no costs"):
        size_queues([])
    with pytest.raises(ConfigError, match="longest at least 1"):
        size_queues(EVEN, longest=0)
    with pytest.raises(ConfigError, match="within must be at least 0"):
        size_queues(EVEN, within=-0.1)
