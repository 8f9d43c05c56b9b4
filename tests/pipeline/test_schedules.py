"""What each block does, counted action by action, for every method on 1 to 5 blocks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from stalempi.errors import ConfigError
from stalempi.pipeline.actions import Action, Op, format_actions, parse_actions
from stalempi.pipeline.schedules import (
    BP,
    DDG,
    DNI,
    DSP,
    FR,
    METHODS,
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    Schedule,
    TwoBW,
    make_schedule,
)

from .nets import methods, uniform

BLOCKS = range(1, 6)
COUNTS = (0, 1, 2, 3, 5, 8, 13)


def every_stream() -> Iterator[tuple[Schedule, int, int, int, list[Action]]]:
    for blocks in BLOCKS:
        for schedule in methods(blocks):
            for count in COUNTS:
                for block in range(blocks):
                    yield schedule, block, blocks, count, list(schedule.stream(block, blocks, count))


def keys(actions: list[Action], op: Op) -> list[tuple[int, int | None]]:
    return [(a.batch, a.micro) for a in actions if a.op is op]


def all_keys(schedule: Schedule, count: int) -> list[tuple[int, int | None]]:
    parts = schedule.micro_batches
    cuts = not isinstance(schedule, (BP, PipeDream, FR, DSP, DNI))
    return [(n, i if cuts else None) for n in range(count) for i in range(parts)]


def test_each_batch_goes_forward_and_back_once_and_is_updated_with_once() -> None:
    for schedule, block, blocks, count, actions in every_stream():
        wanted = all_keys(schedule, count)
        assert keys(actions, Op.FORWARD) == wanted
        assert sorted(keys(actions, Op.BACKWARD), key=str) == sorted(wanted, key=str)
        recomputed = keys(actions, Op.RECOMPUTE)
        assert sorted(recomputed, key=str) == ([] if schedule.keeps_graph(block, blocks) else sorted(wanted, key=str))
        groups = sorted({min(count - 1, n - n % schedule.accumulate + schedule.accumulate - 1) for n in range(count)})
        assert keys(actions, Op.UPDATE) == [(n, None) for n in groups]


def test_work_on_a_batch_is_in_order_and_nothing_is_left_inside() -> None:
    for schedule, block, blocks, count, actions in every_stream():
        place = {action: i for i, action in enumerate(actions)}
        assert len(place) == len(actions), "no action twice"
        for n, i in all_keys(schedule, count):

            def when(op: Op, n: int = n, i: int | None = i, place: dict[Action, int] = place) -> int:
                return place[Action(op, n, i)]

            line = [Op.RECEIVE_ACTIVATION] * (block > 0) + [Op.FORWARD]
            line += [] if schedule.keeps_graph(block, blocks) else [Op.RECOMPUTE]
            line += [Op.RECEIVE_GRADIENT] * (block < blocks - 1 and not schedule.predicts)
            line += [Op.PREDICT] * (block < blocks - 1 and schedule.predicts)
            line += [Op.BACKWARD] + [Op.SEND_GRADIENT] * (block > 0)
            assert [when(op) for op in line] == sorted(when(op) for op in line), (str(schedule), block, n, i)
            if block < blocks - 1:
                assert when(Op.SEND_ACTIVATION) == when(Op.FORWARD) + 1, "sent as soon as it is there"
            if block > 0:
                assert when(Op.SEND_GRADIENT) == when(Op.BACKWARD) + 1


def test_neighbours_agree_on_the_order_of_messages() -> None:
    pairs = ((Op.SEND_ACTIVATION, Op.RECEIVE_ACTIVATION), (Op.RECEIVE_GRADIENT, Op.SEND_GRADIENT))
    for blocks in BLOCKS:
        for schedule in methods(blocks):
            for count in COUNTS:
                streams = [list(schedule.stream(k, blocks, count)) for k in range(blocks)]
                for below, above in itertools.pairwise(streams):
                    for mine, theirs in pairs:
                        assert keys(below, mine) == keys(above, theirs)
                assert not keys(streams[0], Op.RECEIVE_ACTIVATION) + keys(streams[0], Op.SEND_GRADIENT)
                assert not keys(streams[-1], Op.SEND_ACTIVATION) + keys(streams[-1], Op.RECEIVE_GRADIENT)


def test_streams_print_and_parse_and_are_the_steps_and_the_drain() -> None:
    for schedule, block, blocks, count, actions in every_stream():
        assert parse_actions(format_actions(actions)) == actions
        steps = [a for n in range(count) for a in schedule.step(block, blocks, n)]
        assert actions == steps + schedule.drain(block, blocks, count)
        for n in range(count):
            took_in = {a.batch for a in schedule.step(block, blocks, n) if a.op is Op.FORWARD}
            assert took_in == {n}, "a step takes in its batch and no other"


def counted_staleness(schedule: Schedule, actions: list[Action]) -> dict[tuple[int, int | None], int]:
    """Counts, for each batch or micro-batch, the updates between the weights of its forward and its backward."""
    updates = 0
    used: dict[tuple[int, int | None], int] = {}
    found = {}
    for action in actions:
        key = (action.batch, action.micro)
        if action.op is Op.FORWARD:
            used[key] = max(0, action.batch - 1) if schedule.name == "2bw" else updates
        elif action.op is Op.BACKWARD:
            found[key] = updates - used[key]
        updates += action.op is Op.UPDATE
    return found


def test_staleness_in_the_steady_state_is_what_the_method_says() -> None:
    count = 40
    for blocks in BLOCKS:
        for schedule in methods(blocks):
            if schedule.name == "2bw" and blocks == 1:
                assert schedule.staleness(0, 1) == 0
                continue
            for block in range(blocks):
                delay = schedule.delay(block, blocks)
                found = counted_staleness(schedule, list(schedule.stream(block, blocks, count)))
                steady = {value for (n, _), value in found.items() if n >= delay}
                if schedule.accumulate == 1:
                    assert steady == {schedule.staleness(block, blocks)}, (str(schedule), block)
                else:
                    assert max(steady) == schedule.staleness(block, blocks) == -(-delay // schedule.accumulate)
                    assert min(steady) >= delay // schedule.accumulate
                assert max(found.values()) <= schedule.staleness(block, blocks), "warming up is no staler"


@pytest.mark.parametrize("m", [(4, 2, 0), (6, 3, 0), (14, 7, 0), (5, 3, 1)])
def test_staleness_of_dsp_is_m_exactly(m: tuple[int, ...]) -> None:
    schedule = DSP({4: (1, 1, 0), 6: (2, 2, 0), 14: (5, 5, 0), 5: (1, 1, 0)}[m[0]], m)
    for block in range(3):
        found = counted_staleness(schedule, list(schedule.stream(block, 3, 30)))
        assert [found[n, None] for n in range(30)] == [min(n, m[block]) for n in range(30)]


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_fr_is_dsp_without_output_queues(blocks: int, overlaps: bool, accumulate: int) -> None:
    fr, dsp = (
        FR(overlaps=overlaps, accumulate=accumulate),
        uniform(blocks, 0, 1, overlaps=overlaps, accumulate=accumulate),
    )
    assert dsp.m == tuple(blocks - 1 - k for k in range(blocks))
    for block in range(blocks):
        assert list(fr.stream(block, blocks, 11)) == list(dsp.stream(block, blocks, 11))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_dsp_without_queues_is_bp_and_ddg_is_pipedream(blocks: int) -> None:
    for block in range(blocks):
        assert list(uniform(blocks, 0, 0).stream(block, blocks, 7)) == list(BP().stream(block, blocks, 7))
        assert list(DDG().stream(block, blocks, 7)) == list(PipeDream().stream(block, blocks, 7))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("gpipe", "1f1b", "2bw")])
def test_one_block_does_plain_training(name: str) -> None:
    schedule = DSP((0,), (0,)) if name == "dsp" else make_schedule(name)
    assert format_actions(schedule.stream(0, 1, 3)) == "F0 B0 U0 F1 B1 U1 F2 B2 U2"


def test_streams_are_those_of_the_papers() -> None:
    def text(schedule: Schedule, block: int, blocks: int, count: int) -> str:
        return format_actions(schedule.stream(block, blocks, count))

    assert text(BP(), 1, 3, 1) == "<F0 F0 >F0 <B0 B0 >B0 U0"
    assert text(GPipe(2), 0, 2, 1) == "F0.0 >F0.0 F0.1 >F0.1 R0.1 <B0.1 B0.1 R0.0 <B0.0 B0.0 U0"
    assert text(OneForwardOneBackward(3), 0, 2, 1) == (
        "F0.0 >F0.0 F0.1 >F0.1 <B0.0 B0.0 F0.2 >F0.2 <B0.1 B0.1 <B0.2 B0.2 U0"
    )
    assert text(PipeDream(), 0, 2, 2) == "F0 >F0 F1 >F1 <B0 B0 U0 <B1 B1 U1"
    assert text(FR(overlaps=False), 0, 2, 2) == "F0 >F0 F1 >F1 R0 <B0 B0 U0 R1 <B1 B1 U1"
    assert text(FR(), 0, 2, 2) == "F0 >F0 R0 F1 >F1 <B0 B0 U0 R1 <B1 B1 U1"
    assert text(DNI(), 0, 2, 2) == "F0 >F0 P0 B0 U0 F1 >F1 P1 B1 U1 <B0 T0 <B1 T1"
    assert text(TwoBW(2), 0, 2, 2) == (
        "F0.0 >F0.0 F0.1 >F0.1 <B0.0 B0.0 F1.0 >F1.0 <B0.1 B0.1 U0 F1.1 >F1.1 <B1.0 B1.0 <B1.1 B1.1 U1"
    )
    assert text(BP(2), 0, 1, 3) == "F0 B0 F1 B1 U1 F2 B2 U2"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_schedule("sgd"), "unknown method 'sgd': choose one of bp, gpipe, 1f1b, pipedream, 2bw, ddg, fr"),
        (lambda: make_schedule("fr", p=(0, 0)), "method fr has no queue lengths"),
        (lambda: make_schedule("bp", m=(0, 0)), "method bp has no queue lengths"),
        (lambda: make_schedule("dsp"), "dsp needs its queue lengths"),
        (lambda: make_schedule("dsp", p=(0, 0)), "dsp needs its queue lengths"),
        (lambda: make_schedule("dsp", p=(1, 0), m=(0, 0)), "q_1 = m_0 - p_0 - m_1 = -1 is negative"),
        (lambda: make_schedule("dsp", p=(1, 0), m=(2, 0), accumulate=0), "accumulate must be at least 1 batch, got 0"),
        (lambda: make_schedule("fr", micro_batches=2), "method fr has no micro-batches"),
        (lambda: make_schedule("bp", overlaps=False), "method bp recomputes beside no forward"),
        (lambda: make_schedule("gpipe", overlaps=False), "in line is for fr and dsp"),
        (lambda: make_schedule("gpipe", accumulate=2), "method gpipe does not accumulate batches"),
        (lambda: make_schedule("dni", accumulate=2), "method dni does not accumulate batches"),
        (lambda: make_schedule("gpipe", micro_batches=0), "gpipe needs at least 1 micro-batch, got 0"),
        (lambda: make_schedule("1f1b", micro_batches=-1), "1f1b needs at least 1 micro-batch, got -1"),
        (lambda: make_schedule("2bw", micro_batches=0), "2bw needs at least 1 micro-batch, got 0"),
        (lambda: make_schedule("bp", accumulate=0), "accumulate must be at least 1 batch, got 0"),
        (lambda: make_schedule("ddg", accumulate=-1), "accumulate must be at least 1 batch, got -1"),
        (lambda: make_schedule("fr", accumulate=0), "accumulate must be at least 1 batch, got 0"),
        (lambda: BP().check(0), "a pipeline needs at least 1 block, got 0"),
        (lambda: TwoBW(2).check(3), "needs at least as many micro-batches as blocks: 2 for 3"),
        (lambda: uniform(3, 1, 1).check(2), r"dsp\(1,1,0;4,2,0\) is for 3 block\(s\), but there are 2"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=says):
        make()


def test_schedules_are_made_by_name_with_their_options() -> None:
    assert make_schedule("dsp", p=[1, 0], m=[2, 0], accumulate=2, overlaps=False) == DSP((1, 0), (2, 0), False, 2)
    assert make_schedule("fr", accumulate=2) == FR(overlaps=True, accumulate=2)
    assert make_schedule("gpipe", micro_batches=7) == GPipe(7)
    assert make_schedule("pipedream", accumulate=2) == PipeDream(2)
    assert [str(make_schedule(name)) for name in METHODS if name != "dsp"] == (
        ["bp", "gpipe(4)", "1f1b(4)", "pipedream", "2bw(4)", "ddg", "fr", "dni"]
    )
    assert str(uniform(3, 1, 1)) == "dsp(1,1,0;4,2,0)"


def test_each_name_is_used_by_its_method() -> None:
    assert Counter(schedule.name for schedule in methods(2)).keys() == METHODS.keys()
