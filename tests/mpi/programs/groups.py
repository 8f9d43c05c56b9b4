"""Trains in groups and compares with one process on the joined batches: groups.py GROUP."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stalempi

STEPS, BATCH = 20, 13
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(7)
    return [(torch.randn(BATCH, 8, generator=draws), torch.randint(3, (BATCH,), generator=draws)) for _ in range(STEPS)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice, steps: int = STEPS) -> None:
    for x, y in batches()[:steps]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def run(name: str) -> None:
    context = stalempi.init(group=int(sys.argv[1]))
    torch.manual_seed(100 + context.rank)
    model = make_model()
    inner = MAKE[name](model.parameters())
    optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=stalempi.BSP(), bucket_bytes=256)
    if not context.is_server:
        with optimizer:
            train(model, optimizer, slice(context.shard_rank, None, context.num_shards))
        return
    stats = optimizer.serve()
    torch.manual_seed(100)
    alone = make_model()
    train(alone, MAKE[name](alone.parameters()), slice(None))
    pairs = zip(model.state_dict().values(), alone.state_dict().values(), strict=True)
    worst = max(float((a - b).abs().max()) for a, b in pairs)
    print(name, worst, stats.updates, stats.samples, len(stats.workers), flush=True)


def run_uneven() -> None:
    """Lets a leader end before its group in one worker, and after it in another."""
    context = stalempi.init()
    model = make_model()
    optimizer = stalempi.DistributedOptimizer(MAKE["momentum"](model.parameters()), model=model, policy=stalempi.SSP(1))
    steps = [3, 9, 8, 2]
    if context.shard_rank is not None:
        with optimizer:
            train(model, optimizer, slice(None), steps[context.shard_rank])
            optimizer.close()
            assert stalempi.allreduce(steps[context.shard_rank], "sum") == sum(steps)
        return
    stats = optimizer.serve()
    group = context.group_size
    longest = [max(steps[w * group : (w + 1) * group]) for w in range(context.num_workers)]
    assert [worker.iterations for worker in stats.workers] == longest
    assert stats.samples == BATCH * sum(steps)
    print("uneven: no batch lost", flush=True)


for name in MAKE:
    run(name)
run_uneven()
