"""Defines a small decoder-only transformer language model.

B batch, T tokens, D width, V tokens in the vocabulary.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Size", "transformer"]

STD = 0.02  # of new weights (Radford et al. 2019)


class Size(NamedTuple):
    """Layers, width D and attention heads."""

    layers: int
    width: int
    heads: int


class Embed(nn.Module):
    """Learned vectors of tokens and of positions, added."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the vectors."""
        nn.init.normal_(self.tokens.weight, std=STD)
        nn.init.normal_(self.positions, std=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps int64 (B, T), T up to the model's length, to float (B, T, D)."""
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]  # type: ignore[no-any-return]  # nn.Module's call


class Layer(nn.Module):
    """Causal self-attention and a perceptron, each after a LayerNorm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attended = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights; what is added to the residual stream starts smaller by the number of additions."""
        scaled = STD / math.sqrt(2 * self.size.layers)
        for linear, std in (self.qkv, STD), (self.attended, scaled), (self.widen, STD), (self.narrow, scaled):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to the same shape; position t sees none after it."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.size.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))  # type: ignore[no-any-return]  # as above


class Logits(nn.Linear):
    """The output layer: a score of every token of the vocabulary, (B, T, D) to (B, T, V)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)

    def reset_parameters(self) -> None:
        """Draws the weights."""
        nn.init.normal_(self.weight, std=STD)


def transformer(size: Size, vocabulary: int, input_shape: tuple[int], *, tied: bool = False) -> nn.Sequential:
    """Transformer over up to `input_shape[0]` tokens; `tied`: the output layer has the embedding's weights.

    Maps int64 (B, T) to logits (B, T, V): row t is for the token at t + 1.
    """
    assert size.width % size.heads == 0, size
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=(embed := Embed(vocabulary, input_shape[0], size.width)))
    layers |= {f"layer{i}": Layer(size) for i in range(size.layers)}
    layers |= OrderedDict(norm=nn.LayerNorm(size.width), logits=(logits := Logits(size.width, vocabulary)))
    if tied:
        logits.weight = embed.tokens.weight
    return nn.Sequential(layers)
