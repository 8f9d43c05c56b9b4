"""Sends labels that are too large to travel unasked, for methods that take in several micro-batches at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import stalempi

context = stalempi.init(pipeline=True)
torch.set_num_threads(1)


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.mean(1), labels.mean(1))


for method in (stalempi.OneForwardOneBackward(16), stalempi.TwoBW(16), stalempi.DNI(), stalempi.GPipe(8)):
    torch.manual_seed(0)
    pipe = stalempi.Pipeline(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=loss,
        method=method,
        split=[2],
        send_labels=True,
        stall_timeout=20,
    )
    with pipe:
        for _ in range(4):
            pipe.step(torch.randn(16, 4), torch.randn(16, 50_000))
    print(context.rank, method, "done", flush=True)
