"""Versions of weights: each stays while a batch needs it, and no longer."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor, nn

from stalempi.pipeline.weights import Weights


def make(*, stash: bool = True, two: bool = False) -> tuple[nn.Parameter, Weights]:
    parameter = nn.Parameter(torch.zeros(2))
    return parameter, Weights({"w": parameter}, stash=stash, two=two)


def update(parameter: nn.Parameter, weights: Weights) -> None:
    with torch.no_grad():
        parameter.add_(1)  # so that the value is the version
    weights.updated()


def value(found: Tensor) -> int:
    first, second = found.tolist()
    assert first == second
    return int(first)


def test_without_a_stash_every_version_is_the_live_one() -> None:
    parameter, weights = make(stash=False)
    version = weights.pin(0)
    update(parameter, weights)
    assert weights.of(version) is weights.parameters
    weights.unpin(version)
    assert (version, weights.version, weights.most_kept) == (0, 1, 0)


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_a_stash_keeps_as_many_versions_as_batches_are_inside(delay: int) -> None:
    parameter, weights = make()
    inside: deque[tuple[int, int]] = deque()
    for n in range(20):
        inside.append((weights.pin(n), weights.version))
        if n >= delay:
            version, wanted = inside.popleft()
            assert value(weights.of(version)["w"]) == wanted == version == max(0, n - 2 * delay)
            weights.unpin(version)
            update(parameter, weights)
    assert weights.most_kept == delay + 1
    assert len(weights._versions) <= delay + 1
    assert len(weights._pins) <= delay + 1  # nothing grows with the number of batches


def test_a_stashed_version_is_a_copy_that_gradients_can_be_taken_by() -> None:
    parameter, weights = make()
    copy = weights.of(weights.pin(0))["w"]
    assert copy.requires_grad
    assert copy.is_leaf
    assert copy.data_ptr() != parameter.data_ptr()


def test_two_versions_give_each_batch_those_before_the_update_of_the_one_before() -> None:
    parameter, weights = make(two=True)
    for n in range(6):
        pins = [weights.pin(n), weights.pin(n)]  # two micro-batches
        assert [value(weights.of(version)["w"]) for version in pins] == [max(0, n - 1)] * 2
        for version in pins:
            weights.unpin(version)
        update(parameter, weights)
    assert weights.most_kept == 2


def test_two_versions_last_while_the_next_batch_is_inside_already() -> None:
    parameter, weights = make(two=True)
    old = weights.pin(0)
    for n in range(1, 6):
        new = weights.pin(n)  # its first micro-batch comes in before the update of the batch before
        weights.unpin(old)
        update(parameter, weights)
        later = weights.pin(n)
        assert new == later == n - 1
        assert value(weights.of(later)["w"]) == n - 1
        weights.unpin(later)
        old = new
    assert weights.most_kept <= 3


@pytest.mark.parametrize("two", [True, False])
def test_after_a_restart_batches_begin_with_the_weights_of_then(two: bool) -> None:
    parameter, weights = make(two=two)
    for n in range(3):
        weights.unpin(weights.pin(n))
        update(parameter, weights)
    weights.restart(3)
    assert value(weights.of(weights.pin(3))["w"]) == 3


def test_a_restart_with_a_batch_inside_is_our_own_mistake() -> None:
    _, weights = make()
    weights.pin(0)
    with pytest.raises(AssertionError, match="a batch inside needs its weights"):
        weights.restart(0)
