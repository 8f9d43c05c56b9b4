"""Breaks a pipeline in the way that is asked for."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import Tensor, nn

import stalempi

context = stalempi.init(pipeline=True)
HOW = sys.argv[1]


class Breaks(nn.Module):
    """Fails in its fifth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5 and HOW == "raises":
            raise RuntimeError("deliberate")
        if self.calls == 5 and HOW == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return x[:, : 3 if self.calls == 5 and HOW == "shape" else 4]


model = nn.Sequential(nn.Linear(4, 4), Breaks(), nn.Linear(4, 4), nn.Linear(4, 2))
pipe = stalempi.Pipeline(
    model,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    loss=nn.functional.cross_entropy,
    method=stalempi.DSP((1, 1, 0), (4, 2, 0)),
    split=[1, 2],
)
for step in range(20):
    if HOW == "order" and step == 9 and context.rank == 1:
        pipe._runner.batches += 1  # type: ignore[union-attr]  # as after a step that the others did not take
    if HOW == "larger" and step == 9:
        pipe.step(torch.ones(16, 4), torch.zeros(16, dtype=torch.int64))
    if HOW == "nan" and step == 9:
        pipe.step(torch.full((8, 4), torch.nan), torch.zeros(8, dtype=torch.int64))
    pipe.step(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
pipe.close()
