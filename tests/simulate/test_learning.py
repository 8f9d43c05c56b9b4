"""Learning runs drive the product's own server and workers: real gradients, exact order, the same seed the same run."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from stalempi.errors import ConfigError
from stalempi.policy import ASP, BSP, SSP, Leave
from stalempi.simulate.figures import Figures
from stalempi.simulate.learning import Learned, Recipe, learn
from stalempi.simulate.network import Network
from stalempi.simulate.scenarios import find_scenario
from stalempi.simulate.timing import Limit
from stalempi.simulate.workload import Loss, Workload
from stalempi.train.data import Data
from stalempi.train.datasets import Synthetic, load_dataset
from stalempi.train.models import build_model
from stalempi.train.sampler import DistributedSampler

from .runs import NETWORK, POLICIES, Watch, stalls, steady, traced

SIZE = Synthetic(shape=(1, 8, 8), classes=4, train=256, test=64)


@pytest.fixture(scope="module")
def images() -> Data:
    """Four classes that a small network tells apart; shards and batches without remainder."""
    return load_dataset("synthetic", synthetic=SIZE).plain()


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_dataset("digits")


def small(data: Data, **options: object) -> Recipe:
    defaults: dict[str, object] = {"model": "mlp", "samples": 640, "batch_size": 8, "evaluate_every": 160}
    return Recipe(data, **{**defaults, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("network", [None, Network(latency=0.01, service=0.005)], ids=["free", "slow"])
def test_events_and_books_are_those_of_the_timing_run(name: str, network: Network | None, images: Data) -> None:
    """The server counts for itself here, and the timing run there; messages have no size in either."""
    policy = POLICIES[name]()
    watch = Watch(policy)
    learned = learn(policy, stalls(), small(images), network=network, observe=watch)
    stats, trace = traced(POLICIES[name](), stalls(), limit=Limit(pushes=640 // 8), network=network)
    assert watch.records == trace.records
    assert Figures.of(learned.stats) == Figures.of(stats)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_gives_the_same_run_bit_for_bit(name: str, digits: Data) -> None:
    def run(seed: int) -> Learned:
        return learn(
            POLICIES[name](), stalls(seed=seed), small(digits, model="cnn", samples=240), seed=seed, network=NETWORK
        )

    first, second, other = run(1), run(1), run(2)
    assert first.curve == second.curve
    assert first.stats.report() == second.stats.report()
    assert first.curve != other.curve


def test_bsp_is_one_process_on_the_joined_batch(images: Data) -> None:
    """Three rounds of 4 workers with 8 samples each, against plain SGD with the 32 samples that they share."""
    recipe = small(images, samples=96, decay=())
    learned = learn(BSP(), steady(1.0, 2.0, 3.0, 4.0), recipe, seed=5)
    torch.manual_seed(5)
    model = build_model("mlp", num_classes=4, input_shape=(1, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    order = list(DistributedSampler(256, num_workers=1, worker_rank=0, seed=5))
    for start in (0, 32, 64):
        x, y = images.train.batch(order[start : start + 32])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    x, y = images.test.batch(range(64))
    loss = float(nn.functional.cross_entropy(model(x), y).detach())
    assert learned.curve[-1].loss == pytest.approx(loss, rel=1e-5)


def test_a_gradient_is_computed_with_the_parameters_of_its_release(images: Data) -> None:
    """ASP, 1 s and 2.5 s: worker 1's gradient at 2.5 belongs to the first weights, and two updates have come before.

    time       1       2       2.5     3
    worker     0       0       1       0
    gradient   of W0   of W1   of W0   of W2
    makes      W1      W2      W3      W4
    """
    learned = learn(ASP(), steady(1.0, 2.5), small(images, samples=24, lr=0.1, momentum=0.0, decay=()), seed=5)
    shards = [list(DistributedSampler(256, num_workers=2, worker_rank=worker, seed=5)) for worker in (0, 1)]

    def update(before: nn.Module, computed_with: nn.Module, worker: int, batch: int) -> nn.Module:
        x, y = images.train.batch(shards[worker][8 * batch : 8 * batch + 8])
        gradients = torch.autograd.grad(
            nn.functional.cross_entropy(computed_with(x), y), list(computed_with.parameters())
        )
        after = copy.deepcopy(before)
        with torch.no_grad():
            for parameter, gradient in zip(after.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        return after

    torch.manual_seed(5)
    w0 = build_model("mlp", num_classes=4, input_shape=(1, 8, 8))
    w1 = update(w0, w0, 0, 0)
    w2 = update(w1, w1, 0, 1)
    w3 = update(w2, w0, 1, 0)
    w4 = update(w3, w2, 0, 2)
    x, y = images.test.batch(range(64))
    loss = float(nn.functional.cross_entropy(w4(x), y).detach())
    assert learned.stats.updates == 4
    assert learned.curve[-1].loss == pytest.approx(loss, rel=1e-6)


def test_it_learns(digits: Data) -> None:
    workload = find_scenario("jitter").workload(seed=0, horizon=100.0)
    learned = learn(SSP(3), workload, Recipe(digits, samples=6000, evaluate_every=1500))
    assert learned.curve[-1].accuracy > 0.9
    reached = learned.reached(0.8)
    assert reached is not None
    assert reached.seconds < learned.curve[-1].seconds
    assert learned.reached(1.1) is None


def test_the_curve_follows_virtual_time_and_samples(images: Data) -> None:
    learned = learn(SSP(1), steady(1.0, 2.0), small(images))
    assert [point.samples for point in learned.curve[:3]] == [160, 320, 480]
    assert all(a.seconds <= b.seconds and a.samples <= b.samples for a, b in pairwise(learned.curve))
    assert learned.curve[-1].seconds == learned.stats.seconds


def test_a_message_takes_the_model_s_own_size(images: Data) -> None:
    """The MLP has 8320 + 16512 + 516 parameters of 4 bytes, and its layout a few bytes more; 1 kB/s, there and back."""
    learned = learn(BSP(), steady(1.0), small(images, samples=8), network=Network(bandwidth=1000.0))
    nbytes = 4 * (8320 + 16512 + 516)
    assert learned.stats.seconds == pytest.approx(1.0 + 2 * nbytes / 1000.0, rel=1e-3)


@pytest.mark.parametrize("name", POLICIES)
def test_a_worker_that_dies_leaves_and_the_others_finish(name: str, images: Data) -> None:
    watch = Watch(POLICIES[name]())
    workload = Workload(4, stalls().compute, (Loss(1, 5.0, 9.0),))
    learned = learn(watch.policy, workload, small(images), observe=watch)
    leave = next(r.event for r in watch.records if isinstance(r.event, Leave))
    assert (leave.worker, leave.now) == (1, 9.0)
    assert learned.stats.samples >= 640


def test_a_run_can_be_cut_off(images: Data) -> None:
    learned = learn(SSP(1), steady(1.0, 1.0), small(images, samples=10**6, seconds=10.5))
    assert learned.stats.seconds == 10.5
    assert learned.stats.updates == 20


def test_the_caller_s_random_numbers_are_left_alone(images: Data) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    learn(BSP(), steady(1.0), small(images, samples=8), seed=3)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("option", ["samples", "batch_size", "lr", "evaluate_every", "seconds"])
def test_a_recipe_that_cannot_be_is_refused(option: str, images: Data) -> None:
    for value in (0, -1, math.nan):
        with pytest.raises(ConfigError, match=option):
            small(images, **{option: value})
