"""A comparison reads policies from words, and sums runs up with honest intervals."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.errors import ConfigError
from stalempi.simulate.figures import Figures
from stalempi.simulate.sweep import Interval, Outcome, Row, pareto_front, parse_policies, parse_policy, sweep
from stalempi.train.evaluate import Point


@pytest.mark.parametrize(
    ("word", "policy"),
    [
        ("bsp", "bsp()"),
        ("bsp:2", "bsp(backup=2)"),
        ("asp", "asp()"),
        ("ssp:3", "ssp(bound=3)"),
        ("ssp-cached:3", "ssp-cached(bound=3)"),
        ("dssp:3:15", "dssp(lower=3, upper=15, controller=dyn, predictor=ema, eps=0.005)"),
        ("dssp:3:15:paper", "dssp(lower=3, upper=15, controller=paper)"),
        ("dssp:3:15:dyn:mean-std:2", "dssp(lower=3, upper=15, controller=dyn, predictor=mean-std:2, eps=0.005)"),
    ],
)
def test_a_policy_in_a_word(word: str, policy: str) -> None:
    assert str(parse_policy(word)) == policy


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("sssp:3", "policy must be one of"),
        ("ssp", "needs bound"),
        ("ssp:x", "'x' is not a whole number"),
        ("ssp:3:4", "more options than ssp takes"),
        ("asp:1", "more options than asp takes: none"),
        ("dssp:3", "needs lower and upper"),
        ("dssp:15:3", "lower must not be above upper"),
        ("dssp:3:15:best", "controller must be one of"),
        ("dssp:3:15:dyn:guess", "predictor must be one of"),
    ],
)
def test_a_word_that_is_no_policy_is_refused(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_policies(f"bsp,{word}")


def test_a_list_of_policies() -> None:
    assert parse_policies(" bsp, ssp:3,bsp ,") == ["bsp", "ssp:3"]
    with pytest.raises(ConfigError, match="at least one"):
        parse_policies(" ,")


def figures(throughput: float = 1.0, gap_max: int = 0) -> Figures:
    return Figures(1.0, throughput, throughput, 0.0, 0.0, gap_max, 0.0, 0)


def outcome(*accuracies: float) -> Outcome:
    return Outcome(figures(), tuple(Point(10.0 * i, 100 * i, a, 0.0) for i, a in enumerate(accuracies, start=1)))


def test_every_policy_meets_every_seed() -> None:
    met: list[tuple[str, int]] = []

    def run(label: str, seed: int) -> Outcome:
        met.append((label, seed))
        return Outcome(figures(seed, gap_max=seed))

    (row, _) = sweep(["a", "b"], [1, 3], run)
    assert met == [("a", 1), ("a", 3), ("b", 1), ("b", 3)]
    assert (row.label, row.mean("gradients_per_second"), row.largest_gap()) == ("a", 2.0, 3)


def test_time_to_accuracy_is_over_those_that_got_there() -> None:
    row = Row("a", (outcome(0.5, 0.8), outcome(0.9, 0.9), outcome(0.1, 0.2)))
    assert row.until(0.8, "seconds") == Interval.of([20.0, 10.0])
    assert row.until(0.8, "samples") == Interval.of([200.0, 100.0])
    assert row.until(0.95, "seconds") is None
    assert row.final_accuracy() == Interval.of([0.8, 0.9, 0.2])
    assert Row("a", (Outcome(figures()),)).final_accuracy() is None


def test_an_interval_of_five_seeds() -> None:
    """Student's t for 4 degrees of freedom is 2.776."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    interval = Interval.of(values)
    assert (interval.mean, interval.count) == (3.0, 5)
    assert interval.half == pytest.approx(2.776 * statistics.stdev(values) / math.sqrt(5))


def test_one_seed_has_no_interval() -> None:
    assert math.isnan(Interval.of([2.0]).half)


points = st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), max_size=12)


@given(points)
def test_the_front_is_what_nobody_beats(every: list[tuple[float, float]]) -> None:
    def beaten(one: tuple[float, float]) -> bool:
        return any(other != one and other[0] <= one[0] and other[1] >= one[1] for other in every)

    front = {every[place] for place in pareto_front(every)}
    assert front == {one for one in every if not beaten(one)}
