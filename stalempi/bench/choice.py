"""Holds what is trained on what: the model and the data set that a command is told of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from torch import nn

from stalempi.bench.data import load_in_turn
from stalempi.context import Context
from stalempi.errors import ConfigError
from stalempi.train.data import Data
from stalempi.train.datasets import BUILT_IN, DATASETS, TEXT, check_options, load_dataset
from stalempi.train.models import build_model, check_model_name

__all__ = ["Choice", "choice_from", "choice_options"]

F = TypeVar("F", bound=Callable[..., Any])

_count = click.IntRange(min=1)


@dataclass(frozen=True)
class Choice:
    """A model and a data set; see the command's help."""

    model: str
    dataset: str
    data_dir: Path | None
    download: bool
    image_size: int | None
    sequence_length: int | None
    seed: int

    def __post_init__(self) -> None:
        check_model_name(self.model, text=self.dataset in TEXT)
        if self.data_dir is not None and not self._holds_data(self.data_dir) and not self.download:
            raise ConfigError(f"--data-dir {self.data_dir} is not a folder: give the one that holds the data set")
        if self.data_dir is None and self.dataset not in BUILT_IN:
            raise ConfigError(f"--dataset {self.dataset} needs --data-dir: the folder that holds it")
        check_options(
            self.dataset,
            data_dir=self.data_dir,
            download=self.download,
            image_size=self.image_size,
            sequence_length=self.sequence_length,
        )

    def _holds_data(self, place: Path) -> bool:
        return place.is_dir() or (self.dataset == "text" and place.is_file())

    def load(self, context: Context) -> Data:
        """Brings the data set to every rank; all of them call it."""

        def load(download: bool) -> Data:
            return load_dataset(
                self.dataset,
                data_dir=self.data_dir,
                download=download,
                image_size=self.image_size,
                sequence_length=self.sequence_length,
                seed=self.seed,
            )

        return load_in_turn(load, context, download=self.download)

    def build(self, data: Data) -> nn.Module:
        """Builds the model that fits the data."""
        return build_model(self.model, num_classes=data.num_classes, input_shape=data.input_shape)


def choice_options(*, model: str) -> Callable[[F], F]:
    """Returns what adds these options to a click command, with `model` as the default one."""
    options = (
        click.option("--model", default=model, show_default=True, help="Ours, or any model of torchvision by name."),
        click.option("--dataset", type=click.Choice(DATASETS), default="digits", show_default=True),
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path),
            help="Where the data lies; of text, a file or a folder of .txt.",
        ),
        click.option("--download", is_flag=True, help="Let torchvision fetch what is missing in --data-dir."),
        click.option("--image-size", type=_count, help="imagefolder, imagenet: size of every image, pixels."),
        click.option("--sequence-length", type=_count, help="text: tokens (bytes) of a sample [default: 64]."),
        click.option("--seed", type=int, default=0, show_default=True),
    )

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def choice_from(words: dict[str, Any]) -> Choice:
    """Takes these options out of a command's parameters; ConfigError if they do not fit together."""
    return Choice(**{field.name: words.pop(field.name) for field in fields(Choice)})
