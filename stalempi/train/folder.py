"""Reads a tree of class folders: into memory where it fits, image by image where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize

from stalempi.errors import ConfigError
from stalempi.train.augment import CropFlip
from stalempi.train.data import Data
from stalempi.train.images import Scale, TensorImages

__all__ = ["FolderImages", "load_folder", "load_imagenet"]

IN_MEMORY_BYTES = 2 << 30  # of decoded images, training and test together; each rank holds its own copy
IMAGENET = Scale(mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375))  # torchvision's, times 255


def load_folder(root: Path, *, image_size: int | None, seed: int) -> Data:
    """Loads root/train/CLASS/* and root/test/CLASS/* (or root/val/CLASS/*), RGB, labels in the order of folder names.

    Without `image_size` all images must be as large as the first. With it the shorter side is resized to that many
    pixels and the middle square kept. Up to 2 GiB of decoded images are held in memory and trained on with random crop
    (padding 1/8 of the height) and mirror; larger sets are decoded as they are used, with ImageNet's standard
    augmentation (random resized crop, mirror) and normalisation.

    Raises ConfigError if a folder is missing or empty, if train and test have different classes, or if an image cannot
    be read or has another size.
    """
    if image_size is not None and image_size < 1:
        raise ConfigError(f"image_size={image_size}: give the side of the square in pixels, for example 224")
    train, test = _scan_both(root)
    height, width = (image_size, image_size) if image_size else _decode(train.samples[0][0]).shape[1:]
    if 3 * height * width * (len(train) + len(test)) <= IN_MEMORY_BYTES:
        images, test_images = (_decode_all(part, (height, width), resize=image_size) for part in (train, test))
        labels, test_labels = (torch.tensor(part.targets) for part in (train, test))
        scale = Scale.of(images)
        augment = CropFlip(padding=height // 8)
        parts = TensorImages(images, labels, scale, augment, seed), TensorImages(test_images, test_labels, scale)
    elif image_size is None:
        raise ConfigError(f"{root} is too large to be held in memory: give image_size, for example 224")
    else:
        return _on_disk("imagefolder", train, test, image_size, seed)
    return Data("imagefolder", parts[0], parts[1], tuple(train.classes), (3, height, width))


def load_imagenet(root: Path, *, image_size: int, seed: int) -> Data:
    """Loads ImageNet's folders, root/train/CLASS/* and root/val/CLASS/*, decoding images as they are used.

    Training: random resized crop to `image_size` pixels, and mirror. Testing: the shorter side resized to 256/224 of
    that, and the middle. Normalised with ImageNet's published statistics. Raises ConfigError as `load_folder` does.
    """
    return _on_disk("imagenet", *_scan_both(root), image_size, seed)


def _on_disk(name: str, train: ImageFolder, test: ImageFolder, size: int, seed: int) -> Data:
    return Data(
        name,
        FolderImages(tuple(train.samples), size, augment=True, seed=seed),
        FolderImages(tuple(test.samples), size),
        tuple(train.classes),
        (3, size, size),
    )


def _scan_both(root: Path) -> tuple[ImageFolder, ImageFolder]:
    train, test = _scan(root, "train"), _scan(root, "test", "val")
    if train.classes != test.classes:
        differ = sorted(set(train.classes) ^ set(test.classes))
        raise ConfigError(
            f"{train.root} and {test.root} have different classes ({_few(differ)}): each needs a folder for each class"
        )
    return train, test


def _scan(root: Path, *names: str) -> ImageFolder:
    for name in names:
        if (root / name).is_dir():
            try:
                return ImageFolder(root / name)
            except FileNotFoundError as failure:
                reason = str(failure).splitlines()[0].rstrip(".")
                raise ConfigError(f"{root / name}: {reason}; it must hold one folder of images per class") from failure
    raise ConfigError(
        f"no folder {root / names[0]}: data_dir must hold train and test (or val), each with class folders"
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _open(path: str) -> Image.Image:
    try:
        with Image.open(path) as picture:
            rgb: Image.Image = picture.convert("RGB")
            return rgb
    except OSError as failure:
        raise ConfigError(f"cannot read the image {path}: repair or remove it ({type(failure).__name__})") from failure


def _to_bytes(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def _middle(size: int, *, resize: int) -> Compose:
    """Resizes the shorter side to `resize` and keeps the middle size x size pixels."""
    return Compose([Resize(resize), CenterCrop(size)])


def _decode(path: str, *, resize: int | None = None) -> Tensor:
    picture = _open(path)
    return _to_bytes(_middle(resize, resize=resize)(picture) if resize else picture)


def _decode_all(part: ImageFolder, size: tuple[int, int], *, resize: int | None) -> Tensor:
    images = torch.empty(len(part), 3, *size, dtype=torch.uint8)
    for image, (path, _) in zip(images, part.samples, strict=True):
        decoded = _decode(path, resize=resize)
        if decoded.shape != image.shape:
            found, expected = ("x".join(map(str, shape[1:])) for shape in (decoded.shape, image.shape))
            raise ConfigError(f"{path} is {found} and the first image {expected}: give image_size to make them equal")
        image.copy_(decoded)
    return images


@dataclass(frozen=True, eq=False)
class FolderImages(Dataset[tuple[Tensor, int]]):
    """Image files decoded as they are used: `samples` are (path, label), images come out as 3 x size x size."""

    samples: tuple[tuple[str, int], ...]
    size: int
    augment: bool = False
    seed: int = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._fetch(index, None), self.samples[index][1]

    def batch(self, indices: Sequence[int], *, epoch: int | None = None) -> tuple[Tensor, Tensor]:
        """Samples `indices`, see `Images.batch`."""
        images = torch.stack([self._fetch(index, epoch) for index in indices])
        return images, torch.tensor([self.samples[index][1] for index in indices])

    def plain(self) -> FolderImages:
        """Makes the same data set without augmentation."""
        return replace(self, augment=False)

    def _fetch(self, index: int, epoch: int | None) -> Tensor:
        picture = _open(self.samples[index][0])
        if not self.augment:
            return IMAGENET(_to_bytes(_middle(self.size, resize=self.size * 256 // 224)(picture)))
        change = Compose([RandomResizedCrop(self.size), RandomHorizontalFlip()])
        if epoch is None:
            return IMAGENET(_to_bytes(change(picture)))
        # torchvision's transforms know only the global generator
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(np.random.default_rng([self.seed, epoch, index]).integers(2**63)))
            return IMAGENET(_to_bytes(change(picture)))
