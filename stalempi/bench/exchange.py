"""Measures on the ranks of a job what an exchange of so many bytes takes: ours, and what it may be compared with."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import stalempi
from stalempi.bench.comm import Timing
from stalempi.context import Context
from stalempi.flat import Flat
from stalempi.policy import Policy
from stalempi.replica import DEFAULT_BUCKET_BYTES
from stalempi.transport.base import Packet, Parts
from stalempi.transport.message import HEADER_BYTES, Header, Kind

__all__ = ["measure"]

_LIMIT = 600.0
_TAG = 7


# Each rival: (context, bytes, iterations) -> seconds of each on this rank, without the first; [] where it has no part.
Rival = Callable[[Context, int, int], list[float]]


def _timed(iterations: int, act: Callable[[], object]) -> list[float]:
    took = []
    for _ in range(iterations + 1):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    return took[1:]


def _pieces(nbytes: int, piece: int) -> list[slice]:
    return [slice(start, min(nbytes, start + piece)) for start in range(0, nbytes, piece)]


def _raw(context: Context, nbytes: int, iterations: int, piece: int) -> list[float]:
    """A worker sends and receives so many bytes, and nobody looks at them: plain Isend and Irecv."""
    comm, servers = MPI.COMM_WORLD, max(1, context.role.servers)
    nbytes //= servers
    ranges, out = _pieces(nbytes, piece), np.ones(nbytes, np.uint8)
    if context.rank < servers:
        turns = [_answer(comm, worker, out, ranges, iterations + 1) for worker in range(servers, context.size)]
        while turns:
            turns = [turn for turn in turns if next(turn, True) is None]
            os.sched_yield()
        return []
    backs = [np.ones(nbytes, np.uint8) for _ in range(servers)]
    outs = [out, *(np.ones(nbytes, np.uint8) for _ in range(1, servers))]

    def exchange() -> None:
        requests = [comm.Irecv(backs[server][part], server, _TAG) for server in range(servers) for part in ranges]
        requests += [comm.Isend(outs[server][part], server, _TAG) for server in range(servers) for part in ranges]
        while not MPI.Request.Testall(requests):
            os.sched_yield()

    return _timed(iterations, exchange)


def _answer(
    comm: MPI.Intracomm, worker: int, out: np.typing.NDArray[np.uint8], ranges: list[slice], turns: int
) -> Iterator[None]:
    """Takes what `worker` sends and sends as much back, `turns` times; yields while there is nothing to do."""
    place = np.ones_like(out)
    for _ in range(turns):
        requests = [comm.Irecv(place[part], worker, _TAG) for part in ranges]
        while not MPI.Request.Testall(requests):
            yield
        requests = [comm.Isend(out[part], worker, _TAG) for part in ranges]
        while not MPI.Request.Testall(requests):
            yield


def _parts(nbytes: int) -> Parts:
    flat = Flat([torch.empty(nbytes // 4)])
    flat.storages[0].fill_(1.0)
    return Parts(flat.buckets(DEFAULT_BUCKET_BYTES))


def _pushed(context: Context, nbytes: int, iterations: int) -> list[float]:
    """A push and its release, as the transport carries them; nothing is computed."""
    nbytes //= context.role.servers
    if not context.is_server:
        return _push(context, nbytes, iterations)
    pushes = [Packet(HEADER_BYTES, _parts(nbytes)) for _ in range(context.num_workers)]
    headers = [bytearray(HEADER_BYTES) for _ in pushes]
    ranks = context.role.takes_from
    end, parts, left = context.transport.server_end(pushes, headers, ranks), _parts(nbytes), context.num_workers
    while left:
        for worker in end.receive(1.0):
            if Header.unpack(pushes[worker].header).kind is Kind.LEAVE:
                left -= 1
                continue
            Header(Kind.RELEASE, sender=context.rank, layout=0, step=0, nbytes=parts.nbytes).pack_into(headers[worker])
            end.release(worker, parts)
    end.close(_LIMIT)
    return []


def _push(context: Context, nbytes: int, iterations: int) -> list[float]:
    pushes = [Packet(HEADER_BYTES, _parts(nbytes)) for _ in range(context.role.servers)]
    ends = [
        context.transport.worker_end(push, Packet(HEADER_BYTES, _parts(nbytes)), server)
        for server, push in enumerate(pushes)
    ]

    def exchange() -> None:
        for push, end in zip(pushes, ends, strict=True):
            header = Header(Kind.PUSH, sender=context.rank, layout=0, step=0, nbytes=push.parts.nbytes)
            header.pack_into(push.header)
            end.push()
        if not all(end.receive(_LIMIT) for end in ends):
            raise stalempi.StallError(f"no release came within {_LIMIT:g} s")

    took = _timed(iterations, exchange)
    for push, end in zip(pushes, ends, strict=True):
        Header(Kind.LEAVE, sender=context.rank, layout=0, step=0).pack_into(push.header)
        end.leave(_LIMIT)
        end.close()
    return took


def _stepped(context: Context, nbytes: int, iterations: int, policy: Policy) -> list[float]:
    """A whole step of an optimizer, SGD's update and the check for NaN with it."""
    servers = max(1, context.role.servers)
    model = nn.ParameterList([nn.Parameter(torch.ones(nbytes // 4 // servers)) for _ in range(servers)])
    inner = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = stalempi.DistributedOptimizer(inner, model=model, policy=policy)
    if stalempi.is_server():
        optimizer.serve()
        return []
    with optimizer:
        for weight in model:
            weight.grad = torch.ones_like(weight)
        return _timed(iterations, lambda: optimizer.step(samples=1))


def _copied(context: Context, nbytes: int, iterations: int) -> list[float]:
    """A copy in memory."""
    if context.rank:
        return []
    source, target = (torch.ones(nbytes // 4) for _ in range(2))
    return _timed(iterations, lambda: target.copy_(source))


def _reduced(context: Context, nbytes: int, iterations: int) -> list[float]:
    """What DDP does between two processes: an allreduce of gloo."""
    store = tempfile.mkdtemp() if context.rank == 0 else ""
    folder = context.transport.allgather(store.encode(), _LIMIT)[0].decode()
    took = _reduce(context, folder, nbytes, iterations) if context.rank < 2 else []
    context.transport.allgather(b"", _LIMIT)  # neither closes its sockets while the other still reads
    if context.rank < 2:
        _leave_gloo()
    context.transport.allgather(b"", _LIMIT)  # a store waits for its file, should that have gone before it
    if context.rank == 0:
        shutil.rmtree(folder)
    return took


def _reduce(context: Context, folder: str, nbytes: int, iterations: int) -> list[float]:
    import torch.distributed as dist  # noqa: PLC0415 - not in every build of torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = datetime.timedelta(seconds=_LIMIT)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=context.rank, world_size=2, timeout=limit
    )
    tensor = torch.zeros(nbytes // 4)
    return _timed(iterations, lambda: dist.all_reduce(tensor))


def _leave_gloo() -> None:
    import torch.distributed as dist  # noqa: PLC0415

    dist.destroy_process_group()


def _has_gloo(context: Context) -> bool:
    import torch.distributed as dist  # noqa: PLC0415

    return context.size > 1 and context.local_size == context.size and dist.is_available() and dist.is_gloo_available()


def _rivals(context: Context, policy: Policy, nbytes: int) -> dict[str, Rival]:
    found: dict[str, Rival] = {}
    if policy.has_server:
        found["push"] = _pushed
    found["step"] = lambda c, n, k: _stepped(c, n, k, policy)
    found["raw"] = lambda c, n, k: _raw(c, n, k, min(n, 1 << 30))
    if nbytes > DEFAULT_BUCKET_BYTES:
        found["raw in buckets"] = lambda c, n, k: _raw(c, n, k, DEFAULT_BUCKET_BYTES)
    found["memcpy"] = _copied
    if _has_gloo(context):
        found["gloo"] = _reduced
    return found


def measure(context: Context, policy: Policy, nbytes: int, *, repeats: int) -> dict[str, Timing]:
    """Returns the timing of each rival that has a part here, the same on every rank.

    They take turns, `repeats` times, so that what else the machine does meets all of them.
    """
    iterations = max(3, min(100, int(2e8 / nbytes)))
    rivals = _rivals(context, policy, nbytes)
    took: dict[str, list[list[list[float]]]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, rival in rivals.items():
            mine = rival(context, nbytes, iterations)
            everybody = context.transport.allgather(json.dumps(mine).encode(), _LIMIT)
            took[name].append([times for text in everybody if (times := json.loads(text))])
    return {name: _sum_up(turns) for name, turns in took.items()}


def _sum_up(turns: list[list[list[float]]]) -> Timing:
    """Returns the medians over turns, each with the times of each worker."""
    seconds = statistics.median(seconds for turn in turns for times in turn for seconds in times)
    rates = [sum(len(times) / sum(times) for times in turn) for turn in turns]
    return Timing(seconds, statistics.median(rates))
