"""Measures how good a model is on data that it was not trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from stalempi.train.data import Samples
from stalempi.train.loss import count_correct, cross_entropy

__all__ = ["Point", "evaluate"]


@dataclass(frozen=True)
class Point:
    """How good the server's model was after `seconds` of (virtual) time and `samples` global samples."""

    seconds: float
    samples: int
    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples, *, device: torch.device, batch_size: int = 500) -> tuple[float, float]:
    """Returns accuracy (0 .. 1) and mean cross-entropy loss of `model` on all of `samples`, by label or by token.

    The model computes with its running statistics, and is in the mode it was in before when this returns.
    """
    was_training = model.training
    model.eval()
    correct, loss, count = 0, 0.0, 0
    for start in range(0, len(samples), batch_size):
        x, y = samples.batch(range(start, min(start + batch_size, len(samples))))
        logits = model(x.to(device))
        target = y.to(device)
        correct += count_correct(logits, target)
        loss += float(cross_entropy(logits, target, reduction="sum"))
        count += target.numel()
    model.train(was_training)
    return correct / count, loss / count
