"""Predictors turn the service times seen into the next one."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.policy.predictors import PREDICTORS, make_predictor


def after(word: str, services: list[float]) -> float | None:
    predictor = make_predictor(word)
    for service in services:
        predictor.see(service)
    return predictor.next


@pytest.mark.parametrize("word", PREDICTORS)
def test_nothing_is_predicted_before_the_first_service(word: str) -> None:
    assert make_predictor(word).next is None


@pytest.mark.parametrize("word", PREDICTORS)
def test_one_service_predicts_itself(word: str) -> None:
    assert after(word, [2.5]) == 2.5


def test_last_is_the_last() -> None:
    assert after("last", [1.0, 5.0, 2.0]) == 2.0


def test_ema_keeps_the_share_b_of_the_old() -> None:
    assert after("ema", [1.0, 2.0]) == pytest.approx(0.7 * 1.0 + 0.3 * 2.0)
    assert after("ema:0.5", [1.0, 2.0, 4.0]) == pytest.approx(2.75)


@given(services=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30), z=st.floats(0.0, 3.0))
def test_mean_std_is_the_mean_plus_z_deviations(services: list[float], z: float) -> None:
    expected = statistics.fmean(services) + z * statistics.pstdev(services)
    assert after(f"mean-std:{z}", services) == pytest.approx(expected, rel=1e-6, abs=1e-6)
