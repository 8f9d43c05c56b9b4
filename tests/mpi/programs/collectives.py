"""Calls every collective among the ranks that compute, or lets the last one do as WAY says: collectives.py WAY."""

import sys
import time

import torch
from torch import nn

import stalempi

way = sys.argv[1]
context = stalempi.init(evaluator=way == "all")
if context.shard_rank is None:
    if way == "server":
        stalempi.barrier()
    sys.exit()
number, ranks = context.shard_rank, context.num_shards
if number == ranks - 1:
    if way == "ended":
        sys.exit()
    if way == "other":
        stalempi.barrier()

assert stalempi.allreduce(float(number), name="loss") == (ranks - 1) / 2
assert stalempi.allreduce(torch.full((3,), number + 1.0, dtype=torch.bfloat16), "max").tolist() == [float(ranks)] * 3
assert stalempi.broadcast_object({"epoch": number, "best": (0.5, None)}, root=1) == {"epoch": 1, "best": (0.5, None)}

torch.manual_seed(number)
model = nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.Linear(60, 500))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (number + 1))
model(torch.randn(8, 40)).square().sum().backward()
optimizer.step()
stalempi.broadcast_parameters(model.state_dict(), root=ranks - 1)
stalempi.broadcast_optimizer_state(optimizer, root=ranks - 1)
state = [*model.state_dict().values(), *(v for s in optimizer.state_dict()["state"].values() for v in s.values())]
for tensor in state:
    low, high = stalempi.allreduce(tensor, "min"), stalempi.allreduce(tensor, "max")
    assert torch.equal(low, high)

assert optimizer.param_groups[0]["lr"] == 0.1 * ranks
before = stalempi.broadcast_object(time.time(), root=ranks - 1)
stalempi.barrier()
assert time.time() >= before
print(f"rank {context.rank} got it all", flush=True)
