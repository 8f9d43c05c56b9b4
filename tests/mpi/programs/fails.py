"""Fails in the way that is named: fails.py WAY RANK [GROUP]."""

import contextlib
import itertools
import sys
import threading
import time

import torch
from torch import nn

import stalempi

way, failing = sys.argv[1], int(sys.argv[2])
context = stalempi.init(group=int(sys.argv[3]) if sys.argv[3:] else 1)
mine = context.rank == failing


def boom(*_: object) -> None:
    if mine:
        raise ValueError("boom")


if way == "early":
    boom()
model = nn.Linear(4, 6 if way == "shape" and mine else 5)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
policy = stalempi.SSP(3 if way == "policy" and mine else 2)
if way == "absent" and mine:
    time.sleep(60)
optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=policy, observe=boom if way == "observe" else None)


def fail_now() -> None:
    if way == "raise":
        boom()
    if way == "thread" and mine:
        threading.Thread(target=boom).start()
        time.sleep(60)
    if way == "exit" and mine:
        sys.exit(3)
    if way == "systemexit" and mine:
        raise SystemExit(3)
    if way == "thread exit" and mine:
        threading.Thread(target=sys.exit, args=(3,)).start()
        time.sleep(60)
    if way == "caught" and mine:
        threading.Thread(target=sys.exit).start()
        with contextlib.suppress(SystemExit):
            sys.exit(3)
    if way == "silent" and mine:
        time.sleep(60)


if context.is_server:
    if way not in ("noserve", "observe"):
        fail_now()
    if way != "noserve":
        optimizer.serve()
else:
    for step in range(8) if way in ("caught", "noclose") else itertools.count():
        if step == 4:
            fail_now()
        optimizer.zero_grad()
        (model(torch.randn(3, 4)).sum() * (float("nan") if way == "nan" and mine else 1)).backward()
        optimizer.step()
    if way != "noclose":
        optimizer.close()
print(f"rank {context.rank} ended", flush=True)
