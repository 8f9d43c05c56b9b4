"""Waiting spins first, then sleeps in growing steps, and no longer than is good for a message that is half here."""

from __future__ import annotations

import pytest

from stalempi.transport import backoff
from stalempi.transport.backoff import Backoff


class Clock:
    """Stands in for the time and os modules: sleeping and yielding move it on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def sched_yield(self) -> None:
        self.now += 1e-4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(backoff, "time", found)
    monkeypatch.setattr(backoff, "os", found)
    return found


def test_it_spins_then_sleeps_longer_each_time_up_to_the_longest(clock: Clock) -> None:
    wait = Backoff(spin=1e-3, shortest=1e-4, longest=5e-4, growth=2.0)
    while len(clock.slept) < 5:
        wait.pause()
    assert clock.slept == [1e-4, 2e-4, 4e-4, 5e-4, 5e-4]


def test_a_reset_begins_with_spinning_again(clock: Clock) -> None:
    wait = Backoff(spin=1e-3)
    for _ in range(14):
        wait.pause()
    slept = len(clock.slept)
    wait.reset()
    for _ in range(5):
        wait.pause()
    assert len(clock.slept) == slept


def test_a_message_that_is_half_here_is_looked_after_more_often(clock: Clock) -> None:
    wait = Backoff(spin=0.0, shortest=2e-5, longest=1e-3, eager=5e-5, patience=0.0)
    for _ in range(8):
        wait.pause(lambda: True)
    assert max(clock.slept) == 5e-5


def test_while_a_message_arrives_nobody_sleeps_for_a_while(clock: Clock) -> None:
    wait = Backoff(spin=0.0, shortest=1e-3, longest=1e-2, patience=0.2)
    for _ in range(5):
        wait.pause()
    slept = len(clock.slept)
    assert slept > 0
    for _ in range(5):
        wait.pause(lambda: True)
    assert len(clock.slept) == slept
