"""Saves pipelines half way, goes on, goes on again from what was saved; prints what differs, which must be nothing.

pipeline_resume.py FOLDER           a block on each of three ranks
pipeline_resume.py FOLDER copies    a copy of the pipeline on every two ranks, each with statistics of its own
"""

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


def copies(method: stalempi.Schedule) -> stalempi.Pipeline:
    torch.manual_seed(0)
    parts = (nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = nn.Sequential(*parts, nn.Linear(6, 7))
    replicas = context.size // 2 if method.predicts or isinstance(method, stalempi.DSP) else context.size
    cuts = [4] if replicas < context.size else []
    return stalempi.Pipeline(model, optimizer=adam, loss=cross_entropy, method=method, split=cuts, replicas=replicas)


def own_batches(replica: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(replica)
    return [(torch.randn(8, 5, generator=draws), torch.randint(0, 7, (8,), generator=draws)) for _ in range(20)]


def go_on_with_copies(method: stalempi.Schedule, store: CheckpointStore) -> None:
    """Prints in what a copy's own block that was resumed differs from the unbroken one."""
    with copies(method) as pipe:
        data = own_batches(pipe.replica)
        for number, (x, y) in enumerate(data):
            if number == 10:
                pipe.save_checkpoint(store)
            pipe.step(x, y)
        pipe.drain()
        unbroken = {key: value.clone() for key, value in pipe.module.state_dict().items()}
    with copies(method) as pipe:
        pipe.load_checkpoint(store.newest() if context.rank == 0 else None)
        for x, y in data[10:]:
            pipe.step(x, y)
        pipe.drain()
        again = pipe.module.state_dict()
        differ = [key for key in unbroken if not torch.equal(unbroken[key], again[key])]
    print(context.rank, method, len(again), "differ", *differ, flush=True)


if sys.argv[2:] == ["copies"]:
    for number, method in enumerate((stalempi.DSP((1, 0), (2, 0)), stalempi.DNI(), stalempi.BP())):
        go_on_with_copies(method, CheckpointStore(FOLDER / str(number)))
    sys.exit()

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
        # only rank 0 needs to know what to go on from
        more = pipe.load_checkpoint(found if context.rank == 0 else FOLDER / "nowhere")
        assert more is not None
        place = more["place"]
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
