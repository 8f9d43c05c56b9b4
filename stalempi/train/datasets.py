"""Finds the data set that a name means and brings it into memory."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stalempi.errors import ConfigError
from stalempi.train.augment import CropFlip
from stalempi.train.data import Data
from stalempi.train.images import Scale, TensorImages
from stalempi.train.text import LENGTH, load_text, made_up_text

__all__ = ["BUILT_IN", "DATASETS", "TEXT", "Synthetic", "check_options", "load_dataset"]

DATASETS = ("digits", "cifar10", "cifar100", "imagefolder", "imagenet", "synthetic", "text", "text-synthetic")
TEXT = ("text", "text-synthetic")  # their samples are tokens
BUILT_IN = ("digits", "synthetic", "text-synthetic")  # these need no files
_USES = {
    "data_dir": tuple(name for name in DATASETS if name not in BUILT_IN),
    "download": ("cifar10", "cifar100"),
    "image_size": ("imagefolder", "imagenet"),
    "sequence_length": TEXT,
    "synthetic": ("synthetic",),
}


@dataclass(frozen=True)
class Synthetic:
    """What made-up images look like: `shape` (C, H, W), `classes`, number of `train` and `test` images."""

    shape: tuple[int, int, int] = (3, 32, 32)
    classes: int = 10
    train: int = 2048
    test: int = 512

    def __post_init__(self) -> None:
        if min(*self.shape, self.classes, self.train, self.test) < 1:
            raise ConfigError(f"{self}: every number must be at least 1")


def load_dataset(  # noqa: PLR0913  (each data set takes few of them)
    name: str,
    *,
    data_dir: str | Path | None = None,
    download: bool = False,
    image_size: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    synthetic: Synthetic | None = None,
) -> Data:
    """Loads data set `name`, one of DATASETS.

    digits:      the UCI images inside the package, 1437 for training and 360 for testing; 1x8x8, no augmentation.
    cifar10/100: torchvision's files in `data_dir`, fetched only with `download`; random crop and mirror.
    imagefolder: class folders in `data_dir`/train and `data_dir`/test (or val), see `stalempi.train.folder`;
                 `image_size` (pixels) makes every image that large.
    imagenet:    the same folders, always decoded as they are used; `image_size` is 224 by default.
    synthetic:   noisy copies of one random picture per class, as `synthetic` says.
    text:        the bytes of the file `data_dir`, or of all .txt files in that folder, see `stalempi.train.text`;
                 `sequence_length` (tokens) of each sample, 64 if not given.
    text-synthetic: the same of about 150 kB of made-up sentences.

    `seed` governs augmentation and what is made up. Images in memory are normalised by the mean and standard deviation
    of each channel over the training images. An option that the named data set cannot use is an error.

    Raises ConfigError, in one line that says what to do, if the data is not there or not usable.
    """
    check_options(
        name,
        data_dir=data_dir,
        download=download,
        image_size=image_size,
        sequence_length=sequence_length,
        synthetic=synthetic,
    )
    if seed < 0:
        raise ConfigError(f"seed={seed} is negative: give 0 or more")
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return _synthetic(synthetic or Synthetic(), seed)
    if name == "text-synthetic":
        return made_up_text(LENGTH if sequence_length is None else sequence_length, seed=seed)
    if data_dir is None:
        raise ConfigError(f"dataset {name!r} needs data_dir: name the folder that holds it")
    if name == "text":
        return load_text(Path(data_dir), LENGTH if sequence_length is None else sequence_length, seed=seed)
    return _image_files(name, Path(data_dir), download=download, image_size=image_size, seed=seed)


def check_options(name: str, **given: object) -> None:
    """Raises ConfigError if there is no data set `name`, or it has no use for an option of `load_dataset` given here.

    None and False are not given.
    """
    if name not in DATASETS:
        raise ConfigError(_unknown(name))
    used = [option for option, value in given.items() if value is not None and value is not False]
    if stray := [option for option in used if name not in _USES[option]]:
        raise ConfigError(f"dataset {name!r} has no use for {', '.join(stray)}: leave it out")


def _image_files(name: str, root: Path, *, download: bool, image_size: int | None, seed: int) -> Data:
    # torchvision takes a second to import
    if name == "imagefolder":
        from stalempi.train.folder import load_folder  # noqa: PLC0415

        return load_folder(root, image_size=image_size, seed=seed)
    if name == "imagenet":
        from stalempi.train.folder import load_imagenet  # noqa: PLC0415

        return load_imagenet(root, image_size=image_size or 224, seed=seed)
    from stalempi.train.cifar import load_cifar  # noqa: PLC0415

    return load_cifar(name, root, download=download, seed=seed)


def _unknown(name: str) -> str:
    close = get_close_matches(name, DATASETS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(DATASETS)}"
    return f"unknown dataset {name!r}: {hint}"


def _digits() -> Data:
    with files("stalempi.train").joinpath("data/digits.npz").open("rb") as file, np.load(file) as stored:
        images = torch.from_numpy(stored["images"]).unsqueeze(1)
        labels = torch.from_numpy(stored["labels"].astype(np.int64))
        is_test = torch.zeros(len(labels), dtype=torch.bool)
        is_test[torch.from_numpy(stored["test"].astype(np.int64))] = True
    scale = Scale.of(images[~is_test])
    return Data(
        name="digits",
        train=TensorImages(images[~is_test], labels[~is_test], scale),
        test=TensorImages(images[is_test], labels[is_test], scale),
        classes=tuple("0123456789"),
        input_shape=(1, 8, 8),
    )


def _synthetic(spec: Synthetic, seed: int) -> Data:
    random = torch.Generator().manual_seed(seed)
    pictures = torch.randint(64, 192, (spec.classes, *spec.shape), generator=random)

    def draw(samples: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(spec.classes, (samples,), generator=random)
        images = torch.empty(samples, *spec.shape, dtype=torch.uint8)
        for image, label in zip(images, labels.tolist(), strict=True):
            image.copy_(pictures[label] + torch.randint(-64, 64, spec.shape, generator=random))
        return images, labels

    train, test = draw(spec.train), draw(spec.test)
    scale = Scale.of(train[0])
    return Data(
        name="synthetic",
        train=TensorImages(*train, scale, CropFlip(padding=0), seed),
        test=TensorImages(*test, scale),
        classes=tuple(f"class {i}" for i in range(spec.classes)),
        input_shape=spec.shape,
    )
