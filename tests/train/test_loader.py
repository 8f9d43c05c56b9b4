"""The loader hands out each sample of the shard once, knows how far it is, and never forks."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from stalempi.errors import ConfigError
from stalempi.train.datasets import load_dataset
from stalempi.train.folder import FolderImages
from stalempi.train.loader import DataLoader
from stalempi.train.sampler import DistributedSampler


def numbers(size: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def sampler(size: int = 10) -> DistributedSampler:
    return DistributedSampler(size, num_workers=1, worker_rank=0)


def drain(loader: DataLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def test_without_a_sampler_the_order_is_the_data_sets() -> None:
    assert drain(DataLoader(numbers(), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert drain(DataLoader(numbers(), 4, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (len(DataLoader(numbers(), 4)), len(DataLoader(numbers(), 4, drop_last=True))) == (3, 2)


def test_each_pass_is_an_epoch_of_the_sampler() -> None:
    loader, order = DataLoader(numbers(), 3, sampler=sampler()), sampler()
    for _ in range(3):
        assert list(chain.from_iterable(drain(loader))) == list(order)


def test_augmentation_is_keyed_to_the_samplers_epoch() -> None:
    data = load_dataset("synthetic")
    shard = DistributedSampler(data.train, num_workers=50, worker_rank=3)
    loader = DataLoader(data.train, 16, sampler=shard)
    list(loader)
    indices = list(DistributedSampler(data.train, num_workers=50, worker_rank=3))
    shard.set_epoch(0)
    x, y = next(iter(loader))
    expected, labels = data.train.batch(indices[:16], epoch=0)
    assert torch.equal(x, expected)
    assert torch.equal(y, labels)


def test_a_loaded_state_goes_on_with_the_next_batch() -> None:
    loader = DataLoader(numbers(), 3, sampler=sampler())
    run = iter(loader)
    next(run)
    state = loader.state_dict()
    resumed = DataLoader(numbers(), 3, sampler=sampler())
    resumed.load_state_dict(state)
    assert drain(resumed) == [batch[0].tolist() for batch in run]
    assert resumed.state_dict() == loader.state_dict() == state | {"epoch": 1, "position": 0}


def test_with_processes_the_state_is_that_of_the_batch_handed_out(tmp_path: Path) -> None:
    files = []
    for i in range(10):
        Image.new("RGB", (4, 4), (i, i, i)).save(tmp_path / f"{i}.png")
        files.append((str(tmp_path / f"{i}.png"), i))
    loader = DataLoader(FolderImages(tuple(files), 4, augment=True), 2, sampler=sampler(), num_workers=1)
    run = iter(loader)
    taken = next(run)[1].tolist()
    shard = loader.samples
    assert isinstance(shard, DistributedSampler)
    assert shard.position > 2  # drawn ahead
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 2)
    rest = [int(label) for _, labels in run for label in labels]
    assert taken + rest == list(sampler())
    assert loader.state_dict() == shard.state_dict() == state | {"epoch": 1, "position": 0}


def test_data_in_memory_goes_without_processes() -> None:
    loader = DataLoader(load_dataset("digits").train, 32, num_workers=4, persistent_workers=True)
    assert loader.num_workers == 0
    assert sum(len(y) for _, y in loader) == 1437


def test_fork_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'fork' .* is unsafe under MPI: use 'forkserver' or 'spawn'"):
        DataLoader(numbers(), 2, num_workers=2, multiprocessing_context="fork")


def test_forkserver_is_the_default() -> None:
    loader = DataLoader(numbers(), 2, num_workers=2)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match="batch_size=0"):
        DataLoader(numbers(), 0)
    with pytest.raises(ConfigError, match="batch_size=6 is larger than a worker's shard of 5 samples"):
        DataLoader(numbers(), 6, sampler=DistributedSampler(10, num_workers=2, worker_rank=0))
    with pytest.raises(ConfigError, match="only a loader with a DistributedSampler"):
        DataLoader(numbers(), 2).state_dict()
