"""Saves pipelines half way, goes on, goes on again from what was saved; prints what differs, which must be nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import stalempi
from stalempi.train.checkpoint import CheckpointStore
from stalempi.train.loss import cross_entropy

torch.set_num_threads(1)
context = stalempi.init(pipeline=True)
torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    embedding, output = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    output.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(5, 5), nn.Dropout(0.2), nn.Linear(5, 5), nn.LayerNorm(5), output)


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)  # type: ignore[arg-type]


def batches() -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 7, (8, 3), generator=draws), torch.randint(0, 7, (8, 3), generator=draws)) for _ in range(20)
    ]


def pipeline(method: stalempi.Schedule) -> stalempi.Pipeline:
    rates = stalempi.UpdateOptions(schedule=lambda samples: 1 / (1 + samples / 100))
    options = stalempi.BlockOptions(update=rates)
    return stalempi.Pipeline(net(), optimizer=adam, loss=cross_entropy, method=method, split=[2, 4], options=options)


METHODS = [stalempi.DSP((1, 1, 0), (4, 2, 0)), stalempi.DNI(), stalempi.TwoBW(4), stalempi.PipeDream(), stalempi.BP()]
for number, method in enumerate(METHODS):
    store = CheckpointStore(FOLDER / str(number))
    with pipeline(method) as pipe:
        for x, y in batches()[:10]:
            pipe.step(x, y)
        pipe.save_checkpoint(store, {"place": 10})
        for x, y in batches()[10:]:
            pipe.step(x, y)
        unbroken, counts = pipe.state_dict(), pipe.stats.updates
    context.transport.allgather(b"", 60.0)  # rank 0 has committed
    found = store.newest()
    assert found is not None
    with pipeline(method) as pipe:
        place = pipe.load_checkpoint(found)["place"]
        for x, y in batches()[place:]:
            pipe.step(x, y)
        again = pipe.state_dict()
        assert pipe.stats.updates == counts
    differ = [key for key in unbroken if not torch.equal(unbroken[key], again[key])]
    print(context.rank, method, place, len(again), "differ", *differ, flush=True)

try:
    with pipeline(stalempi.FR()) as pipe:
        pipe.load_checkpoint(FOLDER / "0" / "checkpoint-000001")
except stalempi.ConfigError as error:
    print(context.rank, "refused:", error, flush=True)
