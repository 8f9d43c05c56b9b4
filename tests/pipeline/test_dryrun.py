"""The dry run: no method deadlocks, and time, queues and memory are what the papers' formulas say."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalempi.errors import ConfigError
from stalempi.pipeline.actions import Op, parse_actions
from stalempi.pipeline.dryrun import BlockCost, LinkCost, Slow, draw, link_depths, period_of, play, play_actions
from stalempi.pipeline.schedules import (
    BP,
    DDG,
    DNI,
    DSP,
    FR,
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    Schedule,
    TwoBW,
)

from .nets import methods, uniform

seconds = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7, 3.0, 10.0])
block_costs = st.builds(BlockCost, seconds, seconds, seconds, seconds)
links = st.builds(
    LinkCost, st.sampled_from([0.0, 0.1, 1.0, 5.0]), st.sampled_from([1.0, float("inf")]), st.integers(0, 3)
)
any_method = st.integers(1, 5).flatmap(lambda blocks: st.tuples(st.just(blocks), st.sampled_from(methods(blocks))))


@given(any_method, st.lists(block_costs, min_size=5, max_size=5), links, st.integers(0, 12), st.randoms())
@settings(max_examples=80, deadline=None)
def test_whatever_things_cost_no_method_deadlocks_and_queues_and_staleness_are_bounded(
    method: tuple[int, Schedule], costs: list[BlockCost], link: LinkCost, count: int, draws: random.Random
) -> None:
    blocks, schedule = method

    def slow(block: int, step: int) -> float:
        return draws.choice([0.5, 1.0, 4.0])

    run = play(schedule, blocks, count, costs=costs[:blocks], link=link, slow=slow)
    assert len(run.timeline) == sum(len(list(schedule.stream(k, blocks, count))) for k in range(blocks))
    for k in range(blocks):
        assert sum(run.staleness[k].values()) == count * schedule.micro_batches
        assert max(run.staleness[k], default=0) <= schedule.staleness(k, blocks)
    for seen, bound in zip(run.queue, link_depths(schedule, blocks), strict=True):
        assert seen[0] <= bound[0]
        assert seen[1] <= bound[1]


@pytest.mark.parametrize("blocks", range(2, 5))
def test_link_depths_are_reached(blocks: int) -> None:
    """Some timing has that many on their way, so that fewer receives would not do."""
    for schedule in (BP(), PipeDream(), FR(overlaps=False), uniform(blocks, 1, 1, overlaps=False), GPipe(3)):
        bounds = link_depths(schedule, blocks)
        for k in range(blocks - 1):
            most = [0, 0]
            for slowest in (k, k + 1):  # which takes long to do anything, and longest between a send and a receive
                costs = [BlockCost(0, 0, 0) for _ in range(blocks)]
                costs[slowest] = BlockCost(1, 1000, 1, 1000)
                seen = play(schedule, blocks, 20, costs=costs, link=LinkCost(0.001)).queue[k]
                most = [max(a, b) for a, b in zip(most, seen, strict=True)]
            assert most[0] == bounds[k][0], (str(schedule), k)
            assert most[1] in (bounds[k][1], bounds[k][1] - 1)


def test_link_depths_of_the_published_configurations() -> None:
    assert link_depths(DSP((1, 1, 0), (4, 2, 0)), 3) == [(5, 5), (3, 3)]
    assert link_depths(DSP((5, 5, 0), (14, 7, 0)), 3) == [(15, 15), (8, 8)]
    assert link_depths(BP(), 3) == [(1, 1), (1, 1)]
    assert link_depths(GPipe(4), 2) == [(4, 4)]
    assert link_depths(FR(), 1) == []


@pytest.mark.parametrize(
    ("schedule", "free", "with_hops"),
    [
        (BP(), 12.0, 18.0),
        (FR(overlaps=False), 4.0, 14 / 3),
        (uniform(4, 1, 1, overlaps=False), 4.0, 4.0),
        (uniform(4, 2, 2, overlaps=False), 4.0, 4.0),
        (uniform(4, 5, 5, overlaps=False), 4.0, 4.0),
        (FR(), 3.0, 4.5),
        (uniform(4, 1, 1), 3.0, 3.0),
        (PipeDream(), 3.0, 4.5),
        (DDG(), 3.0, 4.5),
        (DNI(), 3.0, 3.0),
        (TwoBW(4), 3.0, 9.0),  # a hop costs each of 4 micro-batches what it costs a batch: 6 hops, and F + B
    ],
    ids=str,
)
def test_periods_are_those_of_the_performance_model(schedule: Schedule, free: float, with_hops: float) -> None:
    assert play(schedule, 4, 120).period == pytest.approx(free, rel=0.005)
    assert play(schedule, 4, 120, link=LinkCost(1.0)).period == pytest.approx(with_hops, rel=0.02)


@pytest.mark.parametrize("schedule", [BP(1), BP(2), BP(4)])
def test_a_period_is_that_of_a_batch_however_many_make_an_update(schedule: Schedule) -> None:
    assert play(schedule, 2, 40).period == pytest.approx(6.0)


def test_a_period_does_not_count_the_drain() -> None:
    schedule = uniform(3, 3, 3, overlaps=False)  # 12 of 30 batches are finished in the drain
    assert play(schedule, 3, 30).period == pytest.approx(4.0)
    assert play(schedule, 3, 3).period == 0.0


def test_the_period_of_a_recorded_run_is_that_of_any_of_its_blocks() -> None:
    run = play(uniform(3, 1, 1, overlaps=False), 3, 60, costs=[BlockCost(1, 1, 2), BlockCost(2, 1, 2), BlockCost()])
    for block in range(3):
        assert period_of([d for d in run.timeline if d.block == block]) == pytest.approx(5.0)
    assert run.period == pytest.approx(5.0)


@pytest.mark.parametrize("blocks", range(1, 5))
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_the_bubble_of_gpipe_and_1f1b(blocks: int, parts: int) -> None:
    costs = [BlockCost(1, 0, 2)] * blocks
    wanted = (blocks - 1) / (parts + blocks - 1)
    assert play(GPipe(parts), blocks, 1, costs=costs).bubble == pytest.approx(wanted)
    assert play(GPipe(parts), blocks, 4, costs=costs).bubble == pytest.approx(wanted)
    assert play(OneForwardOneBackward(parts), blocks, 1, costs=costs).bubble == pytest.approx(wanted)
    # the first recompute runs while its error gradient is awaited, so that it does not lengthen the ramp
    full = play(GPipe(parts), blocks, 1).bubble
    assert full == pytest.approx(3 * (blocks - 1) / (4 * parts + 3 * (blocks - 1)))


def test_a_recompute_beside_a_forward_is_work_only_once() -> None:
    costs = [BlockCost(1, 1, 2), BlockCost(1, 1, 2)]
    assert play(FR(), 2, 200, costs=costs).bubble == pytest.approx(0, abs=0.02)
    longer = [BlockCost(1, 3, 2), BlockCost(1, 3, 2)]
    assert play(FR(), 2, 200, costs=longer).period == pytest.approx(5.0)  # max(F, R) + B of block 0


def test_latency_delays_and_bandwidth_holds_the_link() -> None:
    none = [BlockCost(0, 0, 0)] * 2
    run = play(BP(), 2, 1, costs=none, link=LinkCost(0.5, 10.0, 20))
    assert run.seconds == pytest.approx(2 * (0.5 + 2.0))
    # through a link of 2 s a batch, messages follow one another; the latency is only a delay
    quick = play(uniform(2, 20, 20), 2, 60, costs=none, link=LinkCost(7.0, 10.0, 20))
    assert quick.period == pytest.approx(2.0)
    # micro-batches share the bytes of their batch, and each has its own latency
    cut = play(GPipe(4), 2, 1, costs=none, link=LinkCost(0.0, 10.0, 20))
    assert cut.seconds == pytest.approx(2 * 2.0)


@pytest.mark.parametrize("blocks", range(1, 6))
def test_peaks_are_those_of_the_table_of_methods(blocks: int) -> None:
    def peaks(schedule: Schedule) -> list[tuple[int, int, int]]:
        run = play(schedule, blocks, 30)
        return list(zip(run.inputs, run.graphs, run.versions, strict=True))

    falling = [blocks - k for k in range(blocks)]
    assert peaks(BP()) == [(0, 1, 1)] * blocks
    assert peaks(DNI()) == [(0, 1, 1)] * blocks
    assert peaks(GPipe(4)) == [(4, 1, 1)] * blocks
    assert peaks(OneForwardOneBackward(4)) == [(0, min(4, n), 1) for n in falling]
    assert peaks(PipeDream()) == peaks(DDG()) == [(0, n, n) for n in falling]
    assert peaks(TwoBW(blocks + 1)) == [(0, n, 2 if blocks > 1 else 1) for n in falling]
    assert peaks(FR()) == [(n, 1, 1) for n in falling[:-1]] + [(0, 1, 1)]
    dsp = uniform(blocks, 2, 1)
    assert peaks(dsp) == [(m + 1, 1, 1) for m in dsp.m[:-1]] + [(0, 1, 1)]


def test_bytes_at_the_peak_are_those_of_batches_and_of_parts_of_them() -> None:
    costs = [BlockCost(input_bytes=100, graph_bytes=1000, weight_bytes=7)] * 2
    assert play(BP(), 2, 9).peak_bytes(costs) == [1007, 1007]
    assert play(GPipe(4), 2, 9).peak_bytes(costs) == [100 + 250 + 7] * 2
    assert play(OneForwardOneBackward(4), 2, 9).peak_bytes(costs) == [507, 257]
    assert play(PipeDream(), 2, 9).peak_bytes(costs) == [2014, 1007]
    assert play(DSP((1, 0), (2, 0)), 2, 9).peak_bytes(costs) == [300 + 1000 + 7, 1007]


def one_of_four(factor: float) -> Slow:
    draws = random.Random(5)
    picked = [draws.randrange(4) for _ in range(400)]
    return lambda block, step: 1 + factor * (picked[step] == block)


@pytest.mark.parametrize(
    ("schedule", "percent"),
    [
        (BP(), (5, 12, 25)),
        (FR(overlaps=False), (8, 25, 56)),
        (uniform(4, 1, 1, overlaps=False), (6, 17, 40)),
        (uniform(4, 2, 2, overlaps=False), (5, 15, 32)),
        (uniform(4, 5, 5, overlaps=False), (5, 14, 28)),
        (uniform(4, 1, 1), (6, 19, 45)),
        (FR(), (15, 37, 73)),
    ],
    ids=str,
)
def test_a_random_slow_block_costs_longer_queues_less(schedule: Schedule, percent: Sequence[int]) -> None:
    alone = play(schedule, 4, 100).period
    found = [100 * (play(schedule, 4, 400, slow=one_of_four(f)).period / alone - 1) for f in (0.2, 0.5, 1.0)]
    assert found == pytest.approx(percent, abs=4)


def test_a_step_of_a_slow_block_is_its_forward_its_recompute_and_an_older_backward() -> None:
    slow_at_3 = play(DSP((0, 0), (1, 0)), 2, 6, slow=lambda block, step: 10.0 if (block, step) == (0, 3) else 1.0)
    took = {str(d.action): round(d.end - d.begin) for d in slow_at_3.timeline if d.block == 0 and d.end > d.begin}
    assert {text for text, value in took.items() if value >= 10} == {"F3", "R2", "B2"}


def test_a_deadlock_names_who_waits_for_what() -> None:
    streams = [parse_actions("<B0 F0 >F0 B0"), parse_actions("<F0 F0 B0 >B0")]
    with pytest.raises(ConfigError, match="the schedule deadlocks: block 0 waits for <B0, block 1 waits for <F0"):
        play_actions(streams)


def test_a_wrong_index_names_both_messages() -> None:
    streams = [parse_actions("F0 >F0 F1 >F1"), parse_actions("<F1 F1 <F0 F0")]
    with pytest.raises(ConfigError, match="a block waits for <F1, but its neighbour sends >F0 first"):
        play_actions(streams)
    streams = [parse_actions("F0 >F0.1"), parse_actions("<F0.0 F0")]
    with pytest.raises(ConfigError, match=re.escape("a block waits for <F0.0, but its neighbour sends >F0.1 first")):
        play_actions(streams)


@pytest.mark.parametrize(
    ("streams", "says"),
    [
        (["F0 >F0 F1 >F1", "<F0 F0"], "block 0 sends >F1, which its neighbour never receives"),
        (["F0", "F0 B0 >B0"], "block 1 sends >B0, which its neighbour never receives"),
        (["B0 F0"], "block 0 has B0 before the forward of that batch"),
        (["<F0 F0"], "block 0 has no neighbour for <F0"),
        (["F0 >F0 B0"], "block 0 has no neighbour for >F0"),
    ],
)
def test_streams_that_no_run_can_have_are_refused(streams: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        play_actions([parse_actions(stream) for stream in streams])


def test_costs_are_one_a_block_and_a_schedule_is_checked() -> None:
    with pytest.raises(ConfigError, match="3 costs for 2 blocks"):
        play(BP(), 2, 1, costs=[BlockCost()] * 3)
    with pytest.raises(ConfigError, match="at least as many micro-batches as blocks"):
        play(TwoBW(2), 3, 1)
    with pytest.raises(ConfigError, match="at least as many micro-batches as blocks"):
        link_depths(TwoBW(2), 3)


def test_actions_on_a_block_do_not_overlap_but_for_a_recompute() -> None:
    for blocks in (1, 3):
        for schedule in methods(blocks):
            run = play(schedule, blocks, 9, link=LinkCost(0.5))
            for k in range(blocks):
                lane = [
                    d for d in run.timeline if d.block == k and not (schedule.overlaps and d.action.op is Op.RECOMPUTE)
                ]
                assert all(a.end <= b.begin + 1e-9 for a, b in itertools.pairwise(lane) if b.end > b.begin)


def drawn(schedule: Schedule, blocks: int, count: int, width: int) -> str:
    parts = schedule.micro_batches
    return draw(play(schedule, blocks, count, costs=[BlockCost(parts, parts, 2 * parts)] * blocks), width=width)


def test_tables_look_as_the_papers_draw_them() -> None:
    """Rows are blocks, columns units of time; F = R = 1, B = 2."""
    assert drawn(DSP((1, 1, 0), (4, 2, 0)), 3, 7, 26) == (
        """\
block 0 F0 F1 F2 F3    F4+R0 .  .  B0    B0 F5+R1 B1    B1 F6+R2 B2    B2 R3 B3    B3 R4 B4 B4 R5 B5 B5 R6 B6
block 1 .  F0 F1 F2+R0 .     B0 B0 F3+R1 B1 B1    F4+R2 B2 B2    F5+R3 B3 B3 F6+R4 B4 B4 R5 B5 B5 R6 B6 B6 .
block 2 .  .  F0 B0    B0    F1 B1 B1    F2 B2    B2    F3 B3    B3    F4 B4 B4    F5 B5 B5 F6 B6 B6 .  .  ."""
    )
    assert drawn(PipeDream(), 3, 5, 21) == (
        """\
block 0 F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4
block 1 .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .  B4 B4 .  .
block 2 .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  ."""
    )
    assert drawn(OneForwardOneBackward(4), 3, 1, 18) == (
        """\
block 0 F0.0 F0.1 F0.2 .    .    .    .    B0.0 B0.0 F0.3 B0.1 B0.1 .    B0.2 B0.2 .    B0.3 B0.3
block 1 .    F0.0 F0.1 .    .    B0.0 B0.0 F0.2 B0.1 B0.1 F0.3 B0.2 B0.2 .    B0.3 B0.3 .    .
block 2 .    .    F0.0 B0.0 B0.0 F0.1 B0.1 B0.1 F0.2 B0.2 B0.2 F0.3 B0.3 B0.3 .    .    .    ."""
    )
    assert drawn(GPipe(2), 3, 1, 14) == (
        """\
block 0 F0.0 F0.1 R0.1 .    .    .    .    .    .    B0.1 B0.1 R0.0 B0.0 B0.0
block 1 .    F0.0 F0.1 R0.1 .    .    .    B0.1 B0.1 R0.0 B0.0 B0.0 .    .
block 2 .    .    F0.0 F0.1 R0.1 B0.1 B0.1 R0.0 B0.0 B0.0 .    .    .    ."""
    )


def test_a_drawing_has_a_unit_and_a_width_and_may_be_of_nothing() -> None:
    run = play(BP(), 1, 2)
    assert draw(run, width=8) == "block 0 F0 B0 B0 F1 B1 B1 . ."
    assert draw(run, unit=3.0, width=2) == "block 0 B0+F0 B1+F1"
    assert draw(play(BP(), 1, 0)) == ""
