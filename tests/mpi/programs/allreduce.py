"""Trains without a server on uneven shards and compares with one process and with BSP: allreduce.py.

Worker w has more batches the larger w is, so that all but the last run out of data before the others do.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import stalempi
from stalempi.policy import Policy

STEPS, BATCH = 12, 13
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


class Net(nn.Module):
    """Its branches end in another order than they begin, and one of them is not always taken."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rare = nn.Linear(8, 300), nn.Linear(8, 300), nn.Linear(8, 300)
        self.last = nn.Linear(300, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(x)) + torch.tanh(self.first(x))
        if len(x) % 2:
            hidden = hidden + self.rare(x)
        out: Tensor = self.last(hidden)
        return out


def shards(workers: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yields, for each step, the batches of the workers that still have one; sizes differ, and shrink in the end."""
    draws = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        size = BATCH if step < STEPS - 1 else 3
        batches = [
            (torch.randn(size + w, 8, generator=draws), torch.randint(3, (size + w,), generator=draws))
            for w in range(workers)
        ]
        yield [batch for w, batch in enumerate(batches) if step < STEPS - 3 * (workers - 1 - w)]


def distributed(policy: Policy, optimizer_name: str, seed: int) -> tuple[nn.Module, stalempi.DistributedOptimizer]:
    torch.manual_seed(seed)  # every rank begins with weights of its own
    model = Net()
    inner = MAKE[optimizer_name](model.parameters())
    optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=policy, bucket_bytes=1000)
    if stalempi.is_server():
        optimizer.serve()
        return model, optimizer
    mine, workers = stalempi.worker_rank(), stalempi.num_workers()
    assert mine is not None
    with optimizer:
        for batches in shards(workers):
            place = mine - (workers - len(batches))
            if place >= 0:
                x, y = batches[place]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    return model, optimizer


def alone(optimizer_name: str, workers: int, seed: int) -> nn.Module:
    """Trains on the joined batches in one process; a worker's `rare` branch goes by the size of its own batch."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = MAKE[optimizer_name](model.parameters())
    for batches in shards(workers):
        optimizer.zero_grad()
        total = sum(len(y) for _, y in batches)
        for x, y in batches:
            (nn.functional.cross_entropy(model(x), y) * (len(y) / total)).backward()
        optimizer.step()
    return model


def difference(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def main() -> None:
    context = stalempi.init()
    for optimizer_name in MAKE:
        model, optimizer = distributed(stalempi.Allreduce(), optimizer_name, 100 + context.rank)
        assert stalempi.is_server() == (context.rank == 0)  # again, now that the job is over
        one = alone(optimizer_name, context.size, 100)
        assert difference(model, one) < 1e-5, (context.rank, optimizer_name, difference(model, one))
        stats = optimizer.stats
        steps = [STEPS - 3 * (context.size - 1 - w) for w in range(context.size)]
        assert [worker.iterations for worker in stats.workers] == steps
        assert (stats.updates, optimizer.step_count) == (STEPS, steps[context.rank])
        assert stats.samples == sum(len(y) for batches in shards(context.size) for _, y in batches)
        same_workers = alone(optimizer_name, context.size - 1, 100)
        served, _ = distributed(stalempi.BSP(), optimizer_name, 100 + context.rank)
        if context.rank == 0:
            assert difference(served, same_workers) < 1e-5  # the same program under BSP
            print(optimizer_name, math.ceil(difference(model, one) * 1e6), "millionths", flush=True)


main()
