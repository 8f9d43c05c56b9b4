"""Trains with checkpoints; a rank may signal itself: resume.py FOLDER POLICY TOTAL [RANK STEP SIGNAL]"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time

import torch
from torch import Tensor, nn

import stalempi

SIZE, BATCH = 96, 4
POLICIES = {"bsp": stalempi.BSP(), "ssp": stalempi.SSP(1), "dssp": stalempi.DSSP(0, 3), "asp": stalempi.ASP()}


class Net(nn.Sequential):
    """Has dropout and running statistics, so that random numbers and buffers have to come back, too."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))


def digest(model: nn.Module) -> str:
    """Returns a checksum of every bit of the state_dict; in groups, which share running statistics, without those."""
    kept = model.parameters() if "GROUP" in os.environ else model.state_dict().values()
    values = b"".join(value.detach().numpy().tobytes() for value in kept)
    return hashlib.sha256(values).hexdigest()[:16]


def main() -> None:
    folder, policy, total, *when = sys.argv[1:]
    context = stalempi.init(
        grace=float(os.environ.get("GRACE", "60")),
        group=int(os.environ.get("GROUP", "1")),
        servers=int(os.environ.get("SERVERS", "1")),
    )
    torch.manual_seed(1)
    x = torch.randn(SIZE, 4)
    y = (x.sum(1) > 0).long()
    model = Net()
    checkpoint = None
    if folder != "none":
        checkpoint = stalempi.Checkpoint(folder, every=os.environ.get("EVERY"))
    torch.manual_seed(10 + context.rank)
    random.seed(context.rank)
    optimizer = stalempi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model=model,
        policy=POLICIES[policy],
        total_samples=int(total),
        checkpoint=checkpoint,
    )
    if context.is_server:
        if when and int(when[0]) == 0:
            os.kill(os.getpid(), signal.Signals[when[2]])
        stats = optimizer.serve()
        if context.rank:
            return
        applied, pushed = (sum(getattr(w, key) for w in stats.workers) for key in ("applied", "iterations"))
        print("digest", digest(model), "samples", stats.samples, "updates", stats.updates, applied, pushed, flush=True)
        return
    with optimizer:
        work(optimizer, model, x, y, [int(when[0]), int(when[1]), when[2]] if when else None)


def work(
    optimizer: stalempi.DistributedOptimizer, model: nn.Module, x: Tensor, y: Tensor, when: list[int | str] | None
) -> None:
    sampler = stalempi.DistributedSampler(SIZE)
    loader = stalempi.DataLoader(Data(x, y), BATCH, sampler=sampler)
    optimizer.track(loader)
    while not optimizer.done:
        for inputs, labels in loader:
            optimizer.zero_grad()
            noise = 0.1 * random.random()
            nn.functional.cross_entropy(model(inputs) + noise * model(inputs), labels).backward()
            if when and when[:2] == [stalempi.rank(), optimizer.step_count + 1]:
                os.kill(os.getpid(), signal.Signals[str(when[2])])
                if os.environ.get("HANG"):
                    time.sleep(60)
            optimizer.step(samples=len(inputs))
            time.sleep(float(os.environ.get("PAUSE", "0")))
            if optimizer.done:
                break


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


if __name__ == "__main__":
    main()
