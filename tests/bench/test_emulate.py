"""A worker is made exactly as slow as the user asked, and a request that makes no sense is refused."""

from __future__ import annotations

import time

import pytest

from stalempi.bench.emulate import Pace, parse_slow
from stalempi.errors import ConfigError


class Clock:
    """A clock that only sleeping and `work` move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def work(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: found.now)
    monkeypatch.setattr(time, "sleep", found.sleep)
    return found


def iteration(clock: Clock, pace: Pace, *, work: float, samples: int = 10) -> float:
    """Returns how long an iteration with `work` seconds of real work takes in all."""
    began = clock.now
    pace.begin()
    clock.work(work)
    pace.end(samples)
    return clock.now - began


def test_an_ordinary_worker_never_sleeps(clock: Clock) -> None:
    assert iteration(clock, Pace(), work=0.5) == pytest.approx(0.5)
    assert clock.slept == []


def test_a_factor_stretches_the_time_that_the_work_took(clock: Clock) -> None:
    pace = Pace(1.9)
    assert iteration(clock, pace, work=0.5) == pytest.approx(0.95)
    assert iteration(clock, pace, work=2.0) == pytest.approx(3.8)


def test_emulated_milliseconds_count_per_sample_and_include_the_work(clock: Clock) -> None:
    assert iteration(clock, Pace(emulate_ms=20), work=0.05, samples=10) == pytest.approx(0.2)
    assert iteration(clock, Pace(3.0, emulate_ms=20), work=0.05, samples=5) == pytest.approx(0.3)


def test_real_work_that_takes_longer_than_emulated_is_not_shortened(clock: Clock) -> None:
    assert iteration(clock, Pace(emulate_ms=1), work=0.5, samples=10) == pytest.approx(0.5)
    assert clock.slept == []


def test_what_is_asked_for_each_rank_is_read() -> None:
    assert parse_slow([], 3) == {}
    assert parse_slow(["2=1.9", "1=4"], 3) == {1: 4.0, 2: 1.9}


@pytest.mark.parametrize("spec", ["", "2", "2=", "=2", "two=2", "2=fast", "1.5=2", "2=1=3"])
def test_what_is_not_rank_and_factor_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"--slow takes RANK=FACTOR, as in --slow 2=1\.9, got"):
        parse_slow([spec], 4)


@pytest.mark.parametrize("spec", ["0=2", "3=2", "-1=2"])
def test_the_server_and_ranks_that_are_not_there_cannot_be_slow(spec: str) -> None:
    with pytest.raises(ConfigError, match="workers are ranks 1 to 2"):
        parse_slow([spec], 3)


@pytest.mark.parametrize("spec", ["1=0.5", "1=0", "1=-2", "1=nan", "1=inf"])
def test_a_factor_that_cannot_be_slept_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=f"--slow {spec}"):
        parse_slow([spec], 3)


def test_a_rank_has_one_factor() -> None:
    with pytest.raises(ConfigError, match="rank 1 has a factor already"):
        parse_slow(["1=2", "1=3"], 3)
