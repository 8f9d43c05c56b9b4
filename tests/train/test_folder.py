"""Class folders are read as they stand: real CIFAR-10 images, odd sizes, and everything that can be wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from stalempi.errors import ConfigError
from stalempi.train import folder
from stalempi.train.datasets import load_dataset
from stalempi.train.folder import FolderImages
from stalempi.train.images import TensorImages
from stalempi.train.loader import DataLoader
from stalempi.train.models import build_model
from stalempi.train.sampler import DistributedSampler

UNPACK = Path(__file__).parents[3] / "shared" / "data" / "unpack_cifar10.py"


def write(root: Path, split: str, *, classes: str = "ab", size: tuple[int, int] = (12, 10), per_class: int = 3) -> None:
    """Write PNG images of `size` (width, height), all pixels 100 * label + number of the image."""
    for label, name in enumerate(classes):
        (root / split / name).mkdir(parents=True)
        for i in range(per_class):
            Image.new("RGB", size, (100 * label + i,) * 3).save(root / split / name / f"{i}.png")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path, "train")
    write(tmp_path, "test", per_class=1)
    return tmp_path


def test_images_that_fit_are_held_in_memory_with_labels_by_folder_name(tree: Path) -> None:
    data = load_dataset("imagefolder", data_dir=tree)
    assert isinstance(data.train, TensorImages)
    assert data.train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 100, 101, 102]
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (data.classes, data.input_shape, len(data.test)) == (("a", "b"), (3, 10, 12), 2)


def test_val_stands_in_for_test(tmp_path: Path) -> None:
    write(tmp_path, "train")
    write(tmp_path, "val", per_class=2)
    assert len(load_dataset("imagefolder", data_dir=tmp_path).test) == 4


def test_image_size_makes_odd_images_equal(tree: Path) -> None:
    Image.new("RGB", (40, 30)).save(tree / "train" / "a" / "large.png")
    Image.new("L", (9, 20)).save(tree / "train" / "b" / "grey.png")
    with pytest.raises(ConfigError, match=r"large.png is 30x40 and the first image 10x12: give image_size"):
        load_dataset("imagefolder", data_dir=tree)
    data = load_dataset("imagefolder", data_dir=tree, image_size=8)
    assert data.input_shape == (3, 8, 8)
    assert data.train.batch(range(8))[0].shape == (8, 3, 8, 8)


def test_a_set_too_large_for_memory_is_decoded_as_it_is_used(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "IN_MEMORY_BYTES", 100)
    noise = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tree / "train" / "a" / "noise.png")
    with pytest.raises(ConfigError, match="too large to be held in memory: give image_size"):
        load_dataset("imagefolder", data_dir=tree)
    data = load_dataset("imagefolder", data_dir=tree, image_size=7)
    assert isinstance(data.train, FolderImages)
    x, y = data.train.batch([3, 6], epoch=1)
    assert x.shape == (2, 3, 7, 7)
    assert y.tolist() == [0, 1]
    assert torch.equal(data.train.batch([3], epoch=1)[0][0], x[0])
    assert not torch.equal(data.train.batch([3], epoch=2)[0][0], x[0])
    assert torch.equal(data.plain().train[3][0], data.plain().train[3][0])


def test_drawing_by_epoch_leaves_torchs_generator_alone(tree: Path) -> None:
    images = FolderImages(((str(tree / "train" / "a" / "0.png"), 0),), 7, augment=True)
    state = torch.random.get_rng_state()
    images.batch([0], epoch=0)
    assert torch.equal(torch.random.get_rng_state(), state)


def break_train(root: Path) -> None:
    (root / "train").rename(root / "training")


def break_test(root: Path) -> None:
    (root / "test").rename(root / "testing")


def break_class(root: Path) -> None:
    (root / "test" / "b").rename(root / "test" / "c")


def break_emptiness(root: Path) -> None:
    for image in (root / "train" / "b").iterdir():
        image.unlink()


def break_image(root: Path) -> None:
    (root / "train" / "b" / "1.png").write_bytes(b"not an image")


def break_all(root: Path) -> None:
    write(root / "empty", "train", classes="")
    for split in ("train", "test"):
        for name in "ab":
            (root / split / name).rename(root / f"{split}{name}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_train, "no folder .*train: data_dir must hold train and test"),
        (break_test, "no folder .*test: data_dir must hold train and test"),
        (break_class, r"different classes \(b, c\): each needs a folder for each class"),
        (break_emptiness, "train: Found no valid file for the classes b.*one folder of images per class"),
        (break_all, "train: Couldn't find any class folder.*one folder of images per class"),
        (break_image, "cannot read the image .*1.png: repair or remove it"),
    ],
)
def test_a_damaged_tree_is_one_line_with_a_way_out(tree: Path, damage: object, message: str) -> None:
    assert callable(damage)
    damage(tree)
    with pytest.raises(ConfigError, match=message) as caught:
        load_dataset("imagefolder", data_dir=tree)
    assert "\n" not in str(caught.value)


def test_image_size_below_one_is_refused(tree: Path) -> None:
    with pytest.raises(ConfigError, match="image_size=0"):
        load_dataset("imagefolder", data_dir=tree, image_size=0)


@pytest.mark.skipif(not UNPACK.exists(), reason="the CIFAR-10 images are not beside this repository")
def test_real_cifar_images_are_read_and_learnt(tmp_path: Path) -> None:
    subprocess.run([sys.executable, UNPACK, tmp_path, "100", "20"], check=True, timeout=60)
    data = load_dataset("imagefolder", data_dir=tmp_path)
    assert data.classes == ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    assert (len(data.train), len(data.test), data.input_shape) == (1000, 200, (3, 32, 32))
    torch.manual_seed(0)
    model = build_model("cnn", num_classes=10, input_shape=data.input_shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data.train, 50, sampler=DistributedSampler(data.train, num_workers=1, worker_rank=0))
    for _ in range(6):
        for x, y in loader:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    x, y = data.test.batch(range(200))
    assert (model.eval()(x).argmax(1) == y).float().mean() > 0.25  # chance is 0.1


def test_imagenet_is_decoded_as_it_is_used_whatever_its_size(tree: Path) -> None:
    data = load_dataset("imagenet", data_dir=tree)
    assert (data.name, data.input_shape) == ("imagenet", (3, 224, 224))
    small = load_dataset("imagenet", data_dir=tree, image_size=6)
    assert isinstance(small.train, FolderImages)
    assert isinstance(small.test, FolderImages)
    assert small.train.augment
    assert not small.test.augment
    images, labels = small.test.batch([0])
    assert images.shape == (1, 3, 6, 6)
    assert labels.tolist() == [small.test[0][1]]
