"""Guesses error gradients (DNI, decoupled neural interfaces)."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError

__all__ = ["Predictor", "make_predictor"]

_KEPT = 0.99  # of the running mean square, at each step


def make_predictor(activation: Tensor) -> nn.Module:
    """Makes a net of two layers that maps an activation to a guess of its error gradient, zero at first.

    Args:
        activation: (N, C, H, W) for one with convolutions, (N, ..., features) for one with linear layers.
    """
    if activation.dim() == 4:  # images
        channels = activation.shape[1]
        last: nn.Conv2d | nn.Linear = nn.Conv2d(channels, channels, 5, padding=2)
        first: nn.Module = nn.Conv2d(channels, channels, 5, padding=2, bias=False)
        norm: nn.Module = nn.BatchNorm2d(channels)
    elif activation.dim() >= 2:
        features = activation.shape[-1]
        first, norm, last = nn.Linear(features, features), nn.LayerNorm(features), nn.Linear(features, features)
    else:
        raise ConfigError(
            f"dni predicts gradients of activations with a batch dimension, got {tuple(activation.shape)}"
        )
    nn.init.zeros_(last.weight)
    assert last.bias is not None
    nn.init.zeros_(last.bias)
    return nn.Sequential(first, norm, nn.ReLU(), last).to(activation.device)


class Predictor:
    """The net of one block, and its training.

    Error gradients are small and shrink as training goes on, so the net learns them in units of their running root
    mean square; until the first has come, the guess is zero.

    Args:
        seed: of the net's first weights.
        lr: of its own Adam.

    Attributes:
        net, optimizer: None until the first activation has come.
        shape: of that activation.
        mean_square: of the error gradients, running.
    """

    def __init__(self, seed: int, *, lr: float = 1e-3) -> None:
        self._seed, self._lr = seed, lr
        self.net: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.shape: tuple[int, ...] = ()
        self.mean_square = 0.0
        self._seen: deque[Tensor] = deque()

    def predict(self, activation: Tensor) -> Tensor:
        """Returns the guess for a detached activation, of its shape, and remembers the activation for `train`."""
        net, _ = self.build(activation)
        self._seen.append(activation)
        with torch.no_grad():
            return torch.as_tensor(net(activation.float()) * math.sqrt(self.mean_square)).to(activation.dtype)

    def train(self, gradient: Tensor) -> None:
        """Teaches the net what the error gradient of the oldest activation not yet taught was: one step, mean square.

        A gradient that overflowed (float16) teaches nothing.
        """
        assert self._seen, "a prediction comes first"
        activation, gradient = self._seen.popleft().float(), gradient.float()
        net, optimizer = self.build(activation)
        square = float(gradient.square().mean())
        if not math.isfinite(square):
            return
        self.mean_square = _KEPT * self.mean_square + (1 - _KEPT) * square if self.mean_square else square
        if not self.mean_square:
            return
        optimizer.zero_grad()
        nn.functional.mse_loss(net(activation), gradient / math.sqrt(self.mean_square)).backward()
        optimizer.step()

    def build(self, activation: Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Returns the net and its optimizer, made for activations of this kind the first time."""
        if self.net is None or self.optimizer is None:
            with torch.random.fork_rng(devices=[activation.device] if activation.is_cuda else []):
                torch.manual_seed(self._seed)
                self.net = make_predictor(activation)
            self.shape = tuple(activation.shape)
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=self._lr)
        return self.net, self.optimizer
