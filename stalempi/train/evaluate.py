"""Measures how good a model is on data that it was not trained on."""

from __future__ import annotations

import torch
from torch import nn

from stalempi.train.images import Images

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(model: nn.Module, images: Images, *, device: torch.device, batch_size: int = 500) -> tuple[float, float]:
    """Returns accuracy (0 .. 1) and mean cross-entropy loss of `model` on all of `images`.

    The model computes with its running statistics, and is in the mode it was in before when this returns.
    """
    was_training = model.training
    model.eval()
    correct, loss = 0, 0.0
    for start in range(0, len(images), batch_size):
        x, y = images.batch(range(start, min(start + batch_size, len(images))))
        logits = model(x.to(device))
        target = y.to(device)
        correct += int((logits.argmax(1) == target).sum())
        loss += float(nn.functional.cross_entropy(logits, target, reduction="sum"))
    model.train(was_training)
    return correct / len(images), loss / len(images)
