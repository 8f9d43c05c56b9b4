"""Snapshots are taken when they are due, are what the server's model was, and hold nobody up."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from stalempi.errors import ConfigError, StallError
from stalempi.policy import BSP, Policy
from stalempi.train.evaluation import Evaluation
from stalempi.train.every import Every
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.train.snapshots import WAITING
from tests.job import run_job
from tests.small import data, make_model, momentum, plain

torch.set_num_threads(1)
X, Y = data(64)


def measure(model: nn.Module) -> tuple[float, float]:
    with torch.no_grad():
        logits = model(X)
    return float((logits.argmax(1) == Y).float().mean()), float(nn.functional.cross_entropy(logits, Y))


def train(model: nn.Module, optimizer: DistributedOptimizer, shard: int, pause: float = 0.0) -> None:
    for _ in range(20):
        time.sleep(pause)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[shard::2]), Y[shard::2]).backward()
        optimizer.step()


@pytest.mark.parametrize("evaluator", [False, True], ids=["after training", "on its own rank"])
def test_each_point_of_the_curve_is_the_model_at_that_sample_count(evaluator: bool) -> None:
    made: list[Evaluation] = []

    def evaluation() -> Evaluation:
        made.append(Evaluation(measure, 128))
        return made[-1]

    slowly = partial(train, pause=0.02)  # so that the evaluator need not skip any
    job = run_job(make_model, momentum, BSP(), slowly, workers=2, evaluation=evaluation, evaluator=evaluator)
    alone = make_model()
    optimizer = momentum(alone)
    expected = {}
    for number in range(1, 21):
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(X), Y).backward()
        optimizer.step()
        expected[64 * number] = measure(alone)
    curve = next(e for e in made if e.curve).curve
    assert [point.samples for point in curve] == [*range(128, 1281, 128), 1280]
    for point in curve:
        assert (point.accuracy, point.loss) == pytest.approx(expected[point.samples], abs=1e-5)
    assert [point.seconds for point in curve] == sorted(point.seconds for point in curve)
    assert curve[-1].seconds == job.stats.seconds
    assert measure(job.model) == (curve[-1].accuracy, curve[-1].loss)
    if evaluator:
        assert [e.curve for e in made if e.curve] == [curve, curve]


def test_an_evaluator_that_is_slower_holds_nobody_up_and_measures_the_first_and_the_last() -> None:
    trained = threading.Event()
    made: list[Evaluation] = []

    def slow(model: nn.Module) -> tuple[float, float]:
        assert trained.wait(20), "the workers wait for the evaluator"
        return measure(model)

    def evaluation() -> Evaluation:
        made.append(Evaluation(slow, 64))
        return made[-1]

    def note(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        train(model, optimizer, shard)
        trained.set()

    run_job(make_model, momentum, BSP(), note, workers=2, evaluation=evaluation, evaluator=True)
    served = next(e for e in made if e.skipped)
    assert served.skipped == 21 - len(served.curve)
    assert len(served.curve) <= 1 + WAITING + 2  # training may end a moment before the server's last event
    assert served.curve[0].samples == 64
    assert served.curve[-1].samples == 1280


def test_seconds_may_say_when() -> None:
    made: list[Evaluation] = []

    def evaluation() -> Evaluation:
        made.append(Evaluation(measure, "0.1s"))
        return made[-1]

    def slowly(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        for _ in range(5):
            time.sleep(0.15)
            optimizer.step(samples=1)

    run_job(make_model, plain, BSP(), slowly, workers=1, evaluation=evaluation)
    assert [point.samples for point in made[0].curve or made[1].curve] == [1, 2, 3, 4, 5, 5]


def test_an_evaluator_that_hears_nothing_new_is_kept_company() -> None:
    def idle(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        for _ in range(15):
            time.sleep(0.1)
            optimizer.step(samples=1)

    run_job(
        make_model,
        plain,
        BSP(),
        idle,
        workers=1,
        evaluation=lambda: Evaluation(measure),
        evaluator=True,
        stall_timeout=0.5,
    )


def test_a_silent_evaluator_is_given_up_after_training() -> None:
    def asleep(model: nn.Module) -> tuple[float, float]:
        time.sleep(1.5)
        return 0.0, 0.0

    with pytest.raises(StallError, match=r"the evaluator \(rank 3\) has not measured"):
        run_job(
            make_model,
            plain,
            BSP(),
            train,
            workers=2,
            evaluation=lambda: Evaluation(asleep),
            evaluator=True,
            stall_timeout=0.5,
        )


@pytest.mark.parametrize("text", ["", "0", "-5", "s", "0s", "1.5", "infs", "nans", "often"])
def test_how_often_is_read_or_refused(text: str) -> None:
    assert Every.parse("30s", "evaluate") == Every(seconds=30)
    assert Every.parse(" 5000", "evaluate") == Every(samples=5000)
    assert [str(Every.parse(t, "evaluate")) for t in ("30s", 50, None)] == ["30s", "50", "never"]
    with pytest.raises(ConfigError, match="samples as in 5000, or seconds as in 30s"):
        Every.parse(text, "evaluate")


def test_measuring_is_not_for_a_worker() -> None:
    def ask(model: nn.Module, optimizer: DistributedOptimizer, shard: int) -> None:
        with pytest.raises(ConfigError, match="for the server after serve and for the evaluator"):
            optimizer.evaluate()

    run_job(make_model, plain, BSP(), ask, workers=1, evaluation=lambda: Evaluation(measure))


def test_an_evaluator_without_anything_to_measure_is_refused() -> None:
    policy: Policy = BSP()
    with pytest.raises(ConfigError, match="nothing for it to do"):
        run_job(make_model, plain, policy, train, workers=1, evaluator=True)
