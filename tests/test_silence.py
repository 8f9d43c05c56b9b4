"""Silence is what a running worker keeps, is warned of once, and ends the run at its deadline."""

from __future__ import annotations

import logging

import pytest

from stalempi.errors import StallError
from stalempi.policy import BSP, Push
from stalempi.silence import CHECK_EVERY, Silence


def begin(workers: int = 3) -> tuple[BSP, Silence]:
    policy = BSP()
    policy.start(workers, 100.0)
    return policy, Silence(range(1, workers + 1), 100.0, warning=10.0, timeout=30.0)


def test_a_running_worker_is_warned_of_once_and_those_that_wait_for_it_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy, silence = begin()
    for worker in (0, 2):
        policy.on_push(Push(worker, 105.0))
        silence.broken(worker, 105.0)
    for now in (109.0, 111.0, 113.0, 129.0):
        silence.check(policy, now)
    assert [record.message for record in caplog.records] == [
        "worker 1 (rank 2) has been silent for 11 s since step 0; waiting for it: workers 0, 2"
    ]


def test_a_worker_that_waits_may_be_silent_for_ever() -> None:
    policy, silence = begin(2)
    policy.on_push(Push(0, 101.0))
    silence.broken(0, 101.0)
    silence.broken(1, 1000.0)
    silence.check(policy, 1001.0)


def test_a_word_ends_a_silence_and_the_next_one_is_warned_of_anew(caplog: pytest.LogCaptureFixture) -> None:
    policy, silence = begin(1)
    with caplog.at_level(logging.WARNING, "stalempi"):
        silence.check(policy, 112.0)
        silence.broken(0, 113.0)
        silence.check(policy, 114.0)
        silence.check(policy, 124.0)
    assert len(caplog.records) == 2


def test_the_deadline_ends_the_run() -> None:
    policy, silence = begin()
    silence.check(policy, 129.9)
    with pytest.raises(StallError, match=r"worker 0 \(rank 1\) has been silent for 30 s since step 0: it is stuck"):
        silence.check(policy, 129.9 + CHECK_EVERY)


def test_looks_are_at_least_half_a_second_apart_so_that_pushes_stay_cheap() -> None:
    policy, silence = begin()
    silence.check(policy, 129.9)
    silence.check(policy, 129.9 + CHECK_EVERY - 0.1)  # past the deadline, but too early to look
