"""The sampler deals every epoch exactly: each sample to one worker, the same on every rank, also after a change."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalempi.errors import ConfigError
from stalempi.train.sampler import DistributedSampler


def flat(shards: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(shards))


def workers(size: int, n: int, *, seed: int = 0, shuffle: bool = True) -> list[DistributedSampler]:
    return [DistributedSampler(size, num_workers=n, worker_rank=r, seed=seed, shuffle=shuffle) for r in range(n)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int]:
    n = draw(st.integers(1, 7))
    return draw(st.integers(n, 60)), n


@given(jobs(), st.integers(0, 2**40), st.booleans())
@settings(deadline=None)
def test_shards_are_the_data_set_exactly_and_differ_by_at_most_one(job: tuple[int, int], seed: int, flag: bool) -> None:
    size, n = job
    shards = [list(sampler) for sampler in workers(size, n, seed=seed, shuffle=flag)]
    assert sorted(flat(shards)) == list(range(size))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_the_batches_of_all_workers_are_the_batch_of_one_process() -> None:
    (one,) = workers(60, 1, seed=5)
    whole = list(one)
    shards = [list(sampler) for sampler in workers(60, 3, seed=5)]
    for b in range(5):
        joined = flat(shard[4 * b : 4 * b + 4] for shard in shards)
        assert sorted(joined) == sorted(whole[12 * b : 12 * b + 12])


def test_each_iter_runs_the_next_epoch_and_set_epoch_chooses_one() -> None:
    sampler = workers(50, 1)[0]
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sampler.epoch == 2
    again = workers(50, 1)[0]
    for epoch in (2, 0, 1, 1):
        again.set_epoch(epoch)
        assert list(again) == epochs[epoch]
    assert list(again) == epochs[2]


def test_another_seed_gives_another_order_and_no_shuffle_gives_the_plain_one() -> None:
    assert list(workers(50, 1, seed=1)[0]) != list(workers(50, 1, seed=2)[0])
    sampler = DistributedSampler(range(7), num_workers=2, worker_rank=1, shuffle=False)
    assert [list(sampler), list(sampler)] == [[1, 3, 5], [1, 3, 5]]


@given(jobs(), st.integers(0, 100), st.integers(0, 3))
@settings(deadline=None)
def test_a_loaded_state_goes_on_with_the_next_sample(job: tuple[int, int], taken: int, epochs: int) -> None:
    size, n = job
    sampler = workers(size, n)[0]
    for _ in range(epochs):
        list(sampler)
    run = iter(sampler)
    list(islice(run, taken))
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = workers(size, n)[0]
    resumed.load_state_dict(state)
    rest = list(run)
    if rest:
        assert list(resumed) == rest
    assert list(resumed) == list(sampler)


def test_a_loaded_position_survives_set_epoch_of_the_same_epoch() -> None:
    sampler = workers(20, 1)[0]
    run = iter(sampler)
    list(islice(run, 8))
    resumed = workers(20, 1)[0]
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(0)
    assert list(resumed) == list(run)


@given(jobs(), st.data())
@settings(deadline=None)
def test_resharding_at_known_positions_loses_and_repeats_nothing(job: tuple[int, int], data: st.DataObject) -> None:
    size, n = job
    samplers, taken = workers(size, n), []
    runs = [iter(sampler) for sampler in samplers]
    for _ in range(2):  # two workers leave, one after the other
        n = len(samplers)
        positions = [data.draw(st.integers(0, len(sampler)), label="position") for sampler in samplers]
        for run, count in zip(runs, positions, strict=True):
            taken += list(islice(run, count))
        if n > 1:
            samplers, runs = samplers[:-1], runs[:-1]
        for rank, sampler in enumerate(samplers):
            sampler.reshard(len(samplers), rank, positions=positions)
        sizes = [len(sampler) for sampler in samplers]
        assert max(sizes) - min(sizes) <= 1
    taken += [index for run in runs for index in run]
    assert sorted(taken) == list(range(size))
    assert sorted(flat(samplers)) == list(range(size))


def test_resharding_without_positions_waits_for_the_next_epoch() -> None:
    samplers = workers(30, 3)
    runs = [iter(sampler) for sampler in samplers]
    assert [next(run) for run in runs]
    for rank, sampler in enumerate(samplers[:2]):
        sampler.reshard(2, rank)
    assert [1 + len(list(run)) for run in runs] == [10, 10, 10]
    assert sorted(flat(samplers[:2])) == list(range(30))


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_states_of_all_workers_are_taken_up_by_any_number(new: int) -> None:
    old, taken = workers(40, 3), []
    for sampler, count in zip(old, (4, 9, 0), strict=True):
        taken += list(islice(iter(sampler), count))
    states = [sampler.state_dict() for sampler in old]
    resumed = workers(40, new)
    for sampler in resumed:
        sampler.load_state_dicts(states)
    assert sorted(taken + flat(resumed)) == list(range(40))
    assert {sampler.epoch for sampler in resumed} == {0}


def test_states_of_different_epochs_are_taken_up_at_the_least() -> None:
    fast, slow = workers(40, 2)
    first = list(fast)
    list(islice(iter(fast), 5))
    first += list(islice(iter(slow), 7))
    resumed = workers(40, 1)[0]
    resumed.load_state_dicts([fast.state_dict(), slow.state_dict()])
    assert sorted(first + list(resumed)) == list(range(40))


def test_a_new_iter_ends_the_one_before() -> None:
    sampler = workers(10, 1)[0]
    old = iter(sampler)
    next(old)
    new = iter(sampler)
    assert list(old) == []
    assert sorted(new) == list(range(10))


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (3, {"num_workers": 4, "worker_rank": 0}, "3 samples are too few for 4 workers"),
        (9, {"num_workers": 2, "worker_rank": 2}, "worker_rank=2 of num_workers=2"),
        (9, {"num_workers": 0, "worker_rank": 0}, "num_workers=0"),
        (9, {"num_workers": 1, "worker_rank": 0, "seed": -1}, "seed=-1"),
        (9, {}, "stalempi.init"),
    ],
)
def test_bad_values_are_named(size: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedSampler(size, **options)


def test_a_bad_reshard_or_state_changes_nothing() -> None:
    sampler = workers(10, 2)[0]
    run = iter(sampler)
    next(run)
    before = sampler.state_dict()
    with pytest.raises(ConfigError, match=r"positions \[1, 6\] do not fit .* \[5, 5\]"):
        sampler.reshard(1, 0, positions=[1, 6])
    with pytest.raises(ConfigError, match="worker_rank=1"):
        sampler.reshard(1, 1)
    with pytest.raises(ConfigError, match="same data"):
        sampler.load_state_dict(before | {"size": 11})
    with pytest.raises(ConfigError, match="load_state_dicts"):
        sampler.load_state_dict(before | {"num_workers": 3})
    with pytest.raises(ConfigError, match="do not belong together"):
        sampler.load_state_dicts([before])
    assert sampler.state_dict() == before
    assert len(list(run)) == 4
