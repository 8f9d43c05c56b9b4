"""Trains an embedding with sparse gradients under BSP and compares with one process on the joined batch."""

import warnings

import torch
from torch import Tensor, nn

import stalempi

warnings.filterwarnings("ignore", message="Sparse invariant checks")


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words, self.top = nn.Embedding(5000, 64, sparse=True), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.top(self.words(x).mean(1))
        return y


def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
    draws = torch.Generator().manual_seed(3)
    for _ in range(10):
        x, y = torch.randint(5000, (12, 20), generator=draws), torch.randint(3, (12,), generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


context = stalempi.init()
model = Bag()
optimizer = stalempi.DistributedOptimizer(
    torch.optim.Adagrad(model.parameters(), lr=0.1), model=model, policy=stalempi.BSP()
)
if context.is_server:
    stats = optimizer.serve()
    alone = Bag()
    train(alone, torch.optim.Adagrad(alone.parameters(), lr=0.1), slice(None))
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    print(max(float((a - b).abs().max()) for a, b in pairs), stats.workers[0].bytes_pushed // 10, flush=True)
else:
    with optimizer:
        train(model, optimizer, slice(context.worker_rank, None, context.num_workers))
