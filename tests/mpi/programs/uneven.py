"""Trains a model of several megabytes on uneven data under every policy and checks the books.

Run as uneven.py; any failed check ends the job.
"""

import torch
from torch import nn

import stalempi
from stalempi.policy import Policy

POLICIES: list[Policy] = [
    stalempi.BSP(),
    stalempi.ASP(),
    stalempi.SSP(1),
    stalempi.DSSP(1, 4),
    stalempi.CachedSSP(2),
    stalempi.BSP(backup=1),
]


def run(policy: Policy) -> None:
    context = stalempi.init()
    model = nn.Sequential(nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Linear(4096, 256))
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=policy, bucket_bytes=100_000)
    if not context.is_server:
        assert context.worker_rank is not None
        with optimizer:
            for _ in range(4 + 12 * context.worker_rank):
                optimizer.zero_grad()
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
        return
    stats = optimizer.serve()
    steps = [4 + 12 * worker for worker in range(context.num_workers)]
    assert [worker.iterations for worker in stats.workers] == steps
    assert stats.samples == 8 * (sum(steps) - sum(worker.dropped for worker in stats.workers))
    assert sum(worker.applied + worker.dropped for worker in stats.workers) == sum(steps)
    if policy.bound is not None:
        assert max(worker.gap_max for worker in stats.workers) <= policy.bound + 1
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    print(f"{policy}: balanced", flush=True)


def main() -> None:
    for policy in POLICIES:
        run(policy)


main()
