"""Learning-rate factors are pure functions of global samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from stalempi.errors import ConfigError
from stalempi.train.schedule import Constant, Cosine, Product, Schedule, StepDecay, Warmup, linear_scaling


def test_step_decay_follows_the_papers_epochs() -> None:
    decay = StepDecay(total=300)
    assert [decay(at) for at in (0, 199, 200, 249, 250, 300, 999)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.01])


def test_cosine_falls_from_one_to_its_floor() -> None:
    cosine = Cosine(total=110, start=10, floor=0.2)
    assert [cosine(at) for at in (0, 10, 60, 110, 500)] == pytest.approx([1, 1, 0.6, 0.2, 0.2])
    assert cosine(35) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


def test_warmup_rises_linearly_to_one() -> None:
    warmup = Warmup(length=100, initial=0.25)
    assert [warmup(at) for at in (0, 50, 100, 1000)] == pytest.approx([0.25, 0.625, 1, 1])


def test_schedules_multiply() -> None:
    both = Warmup(100, initial=0.0) * StepDecay(1000, at=(0.5,)) * Constant()
    assert [both(at) for at in (0, 50, 100, 499, 500)] == pytest.approx([0, 0.5, 1, 1, 0.1])
    assert Product(())(7) == 1


@pytest.mark.parametrize("schedule", [Constant(), StepDecay(90), Cosine(90), Warmup(9), Warmup(9) * Cosine(90)])
def test_a_schedule_is_a_value(schedule: Schedule) -> None:
    assert [schedule(at) for at in range(100)] == [schedule(at) for at in range(100)]
    assert hash(schedule) == hash(schedule)


def test_linear_scaling_keeps_the_step_per_sample() -> None:
    assert linear_scaling(0.1, batch_size=1024, reference=256) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepDecay(0), "over 0 samples"),
        (lambda: StepDecay(10, at=(0.5, 1.5)), "shares of the whole run"),
        (lambda: StepDecay(10, factor=0), "decay factor 0"),
        (lambda: Cosine(10, start=10), "start it before the end"),
        (lambda: Cosine(10, floor=2), "floor=2"),
        (lambda: Warmup(0), "warm-up over 0 samples"),
        (lambda: Warmup(5, initial=-1), "warm-up from -1"),
        (lambda: linear_scaling(0.1, batch_size=0, reference=256), "batch_size=0"),
    ],
)
def test_bad_values_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
