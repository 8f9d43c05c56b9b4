"""Accumulates, clips, scales and schedules at once, and compares with one process: gradients.py."""

import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import stalempi
from stalempi.train.groups import decay_groups
from stalempi.train.schedule import Cosine, Warmup

STEPS, PARTS, PART = 12, 4, 3  # each batch is 4 parts of 3 samples, and a worker adds up 4 / workers of them
OVERFLOW = 5
TOTAL = STEPS * PARTS * PART
SCHEDULE = Warmup(40) * Cosine(TOTAL, start=40)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4))
    return model.to(memory_format=torch.channels_last)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(decay_groups(model, 0.05), lr=0.1, momentum=0.9)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        images = torch.randn(PARTS * PART, 3, 8, 8, generator=draws)
        yield images.to(memory_format=torch.channels_last), torch.randint(4, (PARTS * PART,), generator=draws)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mine: range, *, alone: bool) -> None:
    """Takes every step with the parts in `mine`; alone, what the server does is done here."""
    compute = torch.compile(model, backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    samples = 0
    for number, (x, y) in enumerate(batches()):
        if alone:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * SCHEDULE(samples)
        optimizer.zero_grad()
        for part in mine:
            chosen = slice(part * PART, (part + 1) * PART)
            loss = nn.functional.cross_entropy(compute(x[chosen]), y[chosen]) / len(mine)
            torch.autograd.backward(scaler.scale(loss * (math.inf if number == OVERFLOW else 1.0)))
        if alone:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        samples += 0 if number == OVERFLOW else len(x)


context = stalempi.init()
model = make_model()
optimizer = stalempi.DistributedOptimizer(
    make_optimizer(model), model=model, policy=stalempi.BSP(), schedule=SCHEDULE, clip_norm=0.5
)
if context.is_server:
    stats = optimizer.serve()
    lone = make_model()
    train(lone, make_optimizer(lone), range(PARTS), alone=True)
    pairs = list(zip(model.parameters(), lone.parameters(), make_model().parameters(), strict=True))
    moved, difference = (
        max(float((a - b).detach().abs().max()) for a, b in chosen)
        for chosen in ([(p, r) for p, _, r in pairs], [(p, q) for p, q, _ in pairs])
    )
    print(moved, difference, stats.updates, *(worker.skipped for worker in stats.workers), flush=True)
else:
    assert context.worker_rank is not None
    share = PARTS // context.num_workers
    with optimizer:
        train(model, optimizer, range(share * context.worker_rank, share * (context.worker_rank + 1)), alone=False)
    logging.getLogger("stalempi").info("said by nobody who is quiet")
    logging.getLogger("stalempi").warning("has left")
