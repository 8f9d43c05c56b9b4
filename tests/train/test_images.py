"""Images in memory come out normalised and augmented, the same by the sample and by the batch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from stalempi.errors import ConfigError
from stalempi.train.augment import CropFlip, keyed_draws, random_draws
from stalempi.train.images import Scale, TensorImages


@pytest.fixture
def images() -> TensorImages:
    pixels = torch.randint(0, 256, (20, 3, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TensorImages(pixels, torch.arange(20), Scale.of(pixels), CropFlip(padding=2), seed=3)


def test_scale_gives_mean_zero_and_deviation_one_by_channel(images: TensorImages) -> None:
    x = images.scale(images.images)
    assert x.dtype == torch.float32
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_a_constant_channel_is_only_shifted() -> None:
    assert Scale.of(torch.full((2, 1, 2, 2), 7, dtype=torch.uint8)) == Scale(mean=(7.0,), std=(1.0,))


@pytest.mark.parametrize("seed", range(20))
def test_a_crop_is_a_window_of_the_padded_image_mirrored_or_not(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randint(1, 256, (1, 3, 5, 7), dtype=torch.uint8)
    draws = random_draws(1)
    (y,) = CropFlip(padding=2)(x, draws)
    padded = torch.zeros(3, 9, 11, dtype=torch.uint8)
    padded[:, 2:7, 2:9] = x[0]
    top, left = int(draws[0, 0] * 5), int(draws[0, 1] * 5)
    window = padded[:, top : top + 5, left : left + 7]
    assert torch.equal(y, window.flip(-1) if draws[0, 2] < 0.5 else window)


def test_the_largest_draw_stays_inside() -> None:
    x = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    assert CropFlip(padding=1)(x, torch.full((1, 3), 1 - 2**-24)).sum() == 9
    assert torch.equal(CropFlip(padding=0)(x, random_draws(1)), x)


def test_negative_padding_is_refused() -> None:
    with pytest.raises(ConfigError, match="padding=-1"):
        CropFlip(padding=-1)


def test_augmentation_depends_on_seed_epoch_and_sample_only(images: TensorImages) -> None:
    whole, labels = images.batch(range(20), epoch=4)
    part, part_labels = images.batch([7, 3], epoch=4)
    assert torch.equal(part, whole[[7, 3]])
    assert labels[[7, 3]].tolist() == part_labels.tolist() == [7, 3]
    assert not torch.equal(whole, images.batch(range(20), epoch=5)[0])
    assert torch.equal(keyed_draws(0, 0, 9), keyed_draws(0, 0, 9))
    assert not torch.equal(keyed_draws(0, 1, 9), keyed_draws(1, 0, 9))


def test_without_an_epoch_augmentation_follows_torchs_generator(images: TensorImages) -> None:
    torch.manual_seed(1)
    first = images.batch(range(20))[0]
    assert not torch.equal(first, images.batch(range(20))[0])
    torch.manual_seed(1)
    assert torch.equal(first, images.batch(range(20))[0])


def test_plain_images_are_the_pixels_by_sample_by_batch_and_by_torchs_loader(images: TensorImages) -> None:
    plain = images.plain()
    expected = plain.scale(images.images)
    assert torch.equal(plain.batch(range(20))[0], expected)
    assert torch.equal(plain[4][0], expected[4])
    assert plain[4][1] == 4
    (x, y), *rest = TorchLoader(plain, batch_size=16)
    assert torch.equal(x, expected[:16])
    assert y.tolist() == list(range(16))
    assert len(rest) == 1
