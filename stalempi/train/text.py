"""Reads plain text as bytes, or makes some up, and hands out runs of tokens with the tokens that follow.

A token is a byte, so the vocabulary is 256, whatever the language and the encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from stalempi.errors import ConfigError
from stalempi.train.augment import keyed_draws, random_draws
from stalempi.train.data import Data

__all__ = ["LENGTH", "TextSamples", "load_text", "made_up_text"]

LENGTH = 64  # tokens of a sample, where nothing else is asked for
VOCABULARY = 256
MADE_UP = 150_000  # bytes
# sentences of these: what a verb agrees with may be several words before it
ARTICLES = {"s": ("a", "the", "one"), "p": ("the", "some", "two")}
ADJECTIVES = ("old", "quick", "green", "tall", "quiet", "warm")
NOUNS = ("worker", "server", "river", "garden", "letter", "window", "engine", "bird")
VERBS = ("see", "follow", "hold", "answer", "find")
PLACES = ("near", "behind", "above", "with")


@dataclass(frozen=True, eq=False)
class TextSamples(Dataset[tuple[Tensor, Tensor]]):
    """Runs of `length` tokens of a text, side by side; `tokens` is uint8 (N,).

    Args:
        tokens: the text.
        length: T, of a sample; the text holds (N - 1) // T of them.
        shift: each run begins up to T - 1 tokens later, at random, which is the augmentation.
        seed: of that.
    """

    tokens: Tensor
    length: int
    shift: bool = False
    seed: int = 0

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.batch([index])
        return x[0], y[0]

    def batch(self, indices: Sequence[int], *, epoch: int | None = None) -> tuple[Tensor, Tensor]:
        """Samples `indices`: tokens int64 (B, T) and those one further int64 (B, T), see `Samples.batch`."""
        at = torch.as_tensor(indices, dtype=torch.int64)
        starts = at * self.length
        if self.shift:
            draws = random_draws(len(at)) if epoch is None else keyed_draws(self.seed, epoch, len(self))[at]
            starts = starts + (draws[:, 0] * self.length).long()
        starts = starts.clamp(max=len(self.tokens) - 1 - self.length)
        runs = self.tokens[starts.unsqueeze(1) + torch.arange(self.length + 1)].long()
        return runs[:, :-1].contiguous(), runs[:, 1:].contiguous()

    def plain(self) -> TextSamples:
        """Makes the same data set without shifts; the text is shared."""
        return replace(self, shift=False)


def load_text(place: Path, length: int, *, seed: int) -> Data:
    """Loads the file `place`, or all *.txt below that folder joined by name; the last tenth is for testing.

    Raises ConfigError if there is no text, or too little for one sample of `length` tokens in each part.
    """
    files = sorted(place.rglob("*.txt")) if place.is_dir() else [place]
    if not files:
        raise ConfigError(f"no .txt file in {place}: give a text file, or a folder with some")
    try:
        text = b"".join(file.read_bytes() for file in files)
    except OSError as failure:
        raise ConfigError(f"cannot read text from {failure.filename}: {failure.strerror}") from failure
    return _data("text", text, length, seed)


def made_up_text(length: int, *, seed: int) -> Data:
    """Makes up 150 kB of sentences in which verbs agree with their nouns, the same for a seed; 90% are for training."""
    random = np.random.default_rng(seed)
    text = ""
    while len(text) < MADE_UP:
        text += _sentence(random)
    return _data("text-synthetic", text.encode(), length, seed)


def _data(name: str, text: bytes, length: int, seed: int) -> Data:
    if length < 1:
        raise ConfigError(f"sequence_length={length}: give at least 1 token")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    cut = len(tokens) * 9 // 10
    train, test = tokens[:cut], tokens[cut:]
    if len(test) <= length:
        raise ConfigError(
            f"{name}: {len(tokens)} bytes, of which a tenth is for testing, hold no sample of {length} tokens there: "
            "give more text or shorter samples"
        )
    return Data(
        name=name,
        train=TextSamples(train, length, shift=True, seed=seed),
        test=TextSamples(test, length),
        classes=tuple(f"byte {value}" for value in range(VOCABULARY)),
        input_shape=(length,),
    )


def _sentence(random: np.random.Generator) -> str:
    def pick(words: Sequence[str]) -> str:
        return words[int(random.integers(len(words)))]

    def group(number: str) -> str:
        adjective = pick(ADJECTIVES) + " " if random.random() < 0.5 else ""
        return f"{pick(ARTICLES[number])} {adjective}{pick(NOUNS)}{'s' if number == 'p' else ''}"

    numbers = [pick("sp") for _ in range(3)]
    subject, other, third = (group(number) for number in numbers)
    if random.random() < 0.4:
        subject += f" {pick(PLACES)} {third}"
    verb = pick(VERBS) + ("s" if numbers[0] == "s" else "")
    return f"{subject} {verb} {other}.\n"
