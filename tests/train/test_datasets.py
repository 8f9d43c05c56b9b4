"""Data sets come by name, whole and normalised; what is missing is named with the way out."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets.cifar
from torch.nn import functional as F

from stalempi.errors import ConfigError
from stalempi.train.datasets import Synthetic, load_dataset
from stalempi.train.images import TensorImages
from stalempi.train.loader import DataLoader
from stalempi.train.models import build_model
from stalempi.train.sampler import DistributedSampler


def test_digits_are_the_uci_images_in_a_fixed_split() -> None:
    data = load_dataset("digits")
    assert (len(data.train), len(data.test), data.num_classes, data.input_shape) == (1437, 360, 10, (1, 8, 8))
    x, y = data.train.batch(range(1437))
    assert x.shape == (1437, 1, 8, 8)
    assert x.dtype == torch.float32
    assert abs(float(x.mean())) < 1e-5
    counts = torch.bincount(y) + torch.bincount(data.test.batch(range(360))[1])
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # UCI's class distribution


def test_digits_train_and_test_share_no_image() -> None:
    data = load_dataset("digits")
    train, test = (
        {row.tobytes() for row in part.batch(range(len(part)))[0].numpy()} for part in (data.train, data.test)
    )
    assert not train & test


def test_cnn_learns_the_digits_in_one_process() -> None:
    data = load_dataset("digits")
    torch.manual_seed(0)
    model = build_model("cnn", num_classes=data.num_classes, input_shape=data.input_shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data.train, 32, sampler=DistributedSampler(data.train, num_workers=1, worker_rank=0))
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    x, y = data.test.batch(range(360))
    assert (model.eval()(x).argmax(1) == y).float().mean() >= 0.97


def test_synthetic_images_are_as_asked_for_and_the_same_for_a_seed() -> None:
    spec = Synthetic(shape=(2, 6, 5), classes=3, train=40, test=10)
    data = load_dataset("synthetic", synthetic=spec, seed=7)
    assert (len(data.train), len(data.test), data.num_classes, data.input_shape) == (40, 10, 3, (2, 6, 5))
    x, y = data.train.batch(range(40), epoch=0)
    assert x.shape == (40, 2, 6, 5)
    assert set(y.tolist()) == {0, 1, 2}
    again = load_dataset("synthetic", synthetic=spec, seed=7).train.batch(range(40), epoch=0)
    assert torch.equal(x, again[0])
    assert not torch.equal(x, load_dataset("synthetic", synthetic=spec, seed=8).train.batch(range(40), epoch=0)[0])


def write_cifar(root: Path, name: str) -> np.ndarray[Any, Any]:
    """Write a small data set in CIFAR's file format; returns the training pixels (N, 3, 32, 32)."""
    kind = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    random, written = np.random.default_rng(0), []
    key = "labels" if name == "cifar10" else "fine_labels"
    for file, _ in [*kind.train_list, *kind.test_list]:
        pixels = random.integers(0, 256, (4, 3072), dtype=np.uint8)
        (folder / file).write_bytes(pickle.dumps({"data": pixels, key: [1, 0, 3, 2]}))
        written.append(pixels.reshape(4, 3, 32, 32))
    names = [f"name {i}" for i in range(10)]
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: names}))
    return np.concatenate(written[:-1])


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_from_torchvisions_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # made-up files cannot have the published checksums
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    pixels = write_cifar(tmp_path, name)
    data = load_dataset(name, data_dir=tmp_path)
    assert isinstance(data.train, TensorImages)
    assert torch.equal(data.train.images, torch.from_numpy(pixels))
    assert data.train.labels.tolist() == [1, 0, 3, 2] * (len(pixels) // 4)
    assert (len(data.test), data.num_classes, data.input_shape) == (4, 10, (3, 32, 32))
    x, _ = data.train.batch([0, 1], epoch=0)
    assert not torch.equal(x, data.plain().train.batch([0, 1], epoch=0)[0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar", {}, "unknown dataset 'cifar': did you mean 'cifar10'"),
        ("zzz", {}, "choose one of digits, cifar10"),
        ("cifar10", {}, "'cifar10' needs data_dir"),
        ("imagefolder", {}, "'imagefolder' needs data_dir"),
        ("cifar100", {"data_dir": "/nowhere"}, "no whole cifar100 in /nowhere .*ask for the download"),
        ("digits", {"data_dir": "/x", "image_size": 8}, "'digits' has no use for data_dir, image_size"),
        ("digits", {"seed": -1}, "seed=-1"),
    ],
)
def test_what_cannot_be_loaded_is_one_line_with_a_way_out(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_dataset(name, **options)
    assert "\n" not in str(caught.value)


def test_synthetic_numbers_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"classes=0.*at least 1"):
        Synthetic(classes=0)
