"""Defines the loss and the accuracy of every data set here: classes of images, next tokens of text."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

__all__ = ["count_correct", "cross_entropy"]


def cross_entropy(logits: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """Returns the cross-entropy, in nats, over all targets.

    Args:
        logits: float, the shape of `targets` and one dimension more, of classes: (B, V) or (B, T, V).
        targets: int64, (B,) or (B, T).
        reduction: "mean" over all targets, or "sum".
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def count_correct(logits: Tensor, targets: Tensor) -> int:
    """Counts the targets, shapes as above, to which the logits give the highest score."""
    return int((logits.argmax(-1) == targets).sum())
