"""Units are measured one by one, and leave the model as it was."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.measure import UnitCost, best_boundaries, measure, memory_bounds


class Slow(nn.Module):
    """Sleeps for `ms` on the way forward."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.ms / 1e3)
        return x * 2


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_a_slow_unit_is_seen_and_gets_a_block_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Slow(30), nn.Linear(4, 4), nn.ReLU())
    costs = measure(model, torch.randn(2, 4), repeats=1)
    assert [c.name for c in costs] == ["0", "1", "2", "3"]
    assert costs[1].forward >= 0.03
    assert costs[1].recompute >= 0.03
    assert 0 < costs[1].backward < 0.03
    assert best_boundaries(costs, 3) == (1, 2)


def test_bytes_are_counted() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.Tanh(), nn.Flatten())
    costs = measure(model, torch.zeros(2, 3, dtype=torch.int64), repeats=1)
    assert [c.parameter_bytes for c in costs] == [7 * 4 * 4, (4 * 6 + 6) * 4, 0, 0]
    assert [c.input_bytes for c in costs] == [2 * 3 * 8, 2 * 3 * 4 * 4, 2 * 3 * 6 * 4, 2 * 3 * 6 * 4]
    assert costs[2].saved_bytes == 2 * 3 * 6 * 4  # tanh keeps its result
    assert costs[3].saved_bytes == 0


def test_a_model_and_the_random_state_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    measure(model, torch.randn(4, 3), repeats=2)
    random_after = torch.get_rng_state()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(random, random_after)  # randn above
    measured = torch.get_rng_state()
    measure(model, torch.ones(4, 3), repeats=2)
    assert torch.equal(measured, torch.get_rng_state())


def test_a_model_on_the_meta_device_is_measured_and_stays_there() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 300), nn.BatchNorm1d(300))
    costs = measure(model, torch.ones(4, 3), repeats=1)
    assert costs[0].forward > 0
    assert costs[0].parameter_bytes == 4 * 300 * 4
    assert all(p.is_meta for p in model.parameters())


def unit(seconds: float, *, parameters: int = 0, inputs: int = 0) -> UnitCost:
    return UnitCost("u", seconds, seconds, 2 * seconds, parameters, 0, inputs)


def test_links_recompute_and_memory_move_the_boundary() -> None:
    costs = [unit(1), unit(1, inputs=8), unit(1, inputs=8), unit(1, inputs=1)]
    assert best_boundaries(costs, 2) == (2,)
    assert best_boundaries(costs, 2, bytes_per_second=1) == (3,)
    uneven = [UnitCost("a", 1, 9, 1, 0, 0, 0), UnitCost("b", 2, 0, 2, 0, 0, 0), UnitCost("c", 2, 0, 2, 0, 0, 0)]
    assert best_boundaries(uneven, 2) == (1,)
    assert best_boundaries(uneven, 2, recompute_hidden=True) == (2,)
    large = [unit(1, parameters=10), unit(1, parameters=10), unit(1, parameters=10), unit(1, parameters=1)]
    assert best_boundaries(large, 2, memory=memory_bounds(large, (30, 70))) == (1,)


def test_what_cannot_be_measured_or_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="unit 0 makes a tuple"):
        measure(nn.Sequential(Pair()), torch.zeros(1))
    with pytest.raises(ConfigError, match="repeats=0"):
        measure(nn.Sequential(Pair()), torch.zeros(1), repeats=0)
    with pytest.raises(ConfigError, match="bytes_per_second=0"):
        best_boundaries([unit(1)], 1, bytes_per_second=0)
    with pytest.raises(ConfigError, match="2 blocks with 1 limits"):
        memory_bounds([unit(1)], [9], held=[1, 1])
    with pytest.raises(ConfigError, match="copies=0"):
        memory_bounds([unit(1)], [9], copies=0)
