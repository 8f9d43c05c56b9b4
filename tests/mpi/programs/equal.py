"""Trains on shards and compares with one process on the joined batches: equal.py POLICY[:OVERLAP[:early]]..."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stalempi

STEPS, BATCH = 30, 13
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(7)
    return [(torch.randn(BATCH, 8, generator=draws), torch.randint(3, (BATCH,), generator=draws)) for _ in range(STEPS)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def run(policy_name: str, optimizer_name: str) -> None:
    context = stalempi.init()
    name, overlap, early = [*policy_name.split(":"), "", ""][:3]
    policy = {"bsp": stalempi.BSP(), "asp": stalempi.ASP(), "ssp": stalempi.SSP(0)}[name]
    torch.manual_seed(100 + context.rank)  # every rank begins with weights of its own
    model = make_model()
    inner = MAKE[optimizer_name](model.parameters())
    optimizer = stalempi.DistributedOptimizer(
        inner, model=model, policy=policy, bucket_bytes=256, overlap=overlap or "hooks", early_forward=early == "early"
    )
    if context.is_server:
        optimizer.serve()
        torch.manual_seed(100)
        alone = make_model()
        train(alone, MAKE[optimizer_name](alone.parameters()), slice(None))
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        print(policy_name, optimizer_name, max(float((a - b).abs().max()) for a, b in pairs), flush=True)
        return
    assert context.worker_rank is not None
    with optimizer:
        train(model, optimizer, slice(context.worker_rank, None, context.num_workers))


for chosen in sys.argv[1:]:
    for optimizer_name in MAKE:
        run(chosen, optimizer_name)
