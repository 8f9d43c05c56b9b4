"""Measures how good a model in blocks is: batches go up the pipe once, and nothing comes back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from stalempi.errors import ConfigError
from stalempi.pipeline.block import Block, Loss, Tensors
from stalempi.pipeline.link import Receiver, Sender

__all__ = ["Score", "evaluate_block"]


@dataclass
class Score:
    """What was right: `correct` of `count` labels, and the sum of their losses."""

    correct: int = 0
    loss: float = 0.0
    count: int = 0


@torch.no_grad()
def evaluate_block(
    block: Block,
    batches: Iterable[tuple[Tensors, Tensors]],
    loss: Loss,
    *,
    below: Receiver | None,
    above: Sender | None,
) -> Score:
    """Takes this block's part in one pass over test data; returns the score on the last block, an empty one elsewhere.

    Args:
        block: of this rank.
        batches: data, used on the first block, and labels, used on the last: every rank has the same.
        loss: `loss(output, labels)`, a mean over labels.
        below, above: where inputs come from and outputs go to, in messages of any size.
    """
    score = Score()
    for place, (x, labels) in enumerate(batches):
        outputs = block.evaluate(below.receive((place, 0)) if below else x)
        if above:
            above.send((place, 0), outputs)
            continue
        if len(labels) != 1 or labels[0].shape != outputs[0].shape[:-1]:
            raise ConfigError(
                f"outputs of {tuple(outputs[0].shape)} and labels of {[tuple(y.shape) for y in labels]} do not fit: "
                "give (samples, ..., classes) and (samples, ...)"
            )
        score.correct += int((outputs[0].argmax(-1) == labels[0]).sum())
        score.loss += float(loss(*outputs, *labels)) * labels[0].numel()
        score.count += labels[0].numel()
    if above:
        above.flush()
    return score
