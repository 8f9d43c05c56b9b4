"""Measures what waiting costs under several backoffs: mpirun -n 3 python benchmarks/waiting/measure.py.

Rank 0 serves, ranks 1 and 2 work. The two sides of the trade are measured in the same run, the settings alternating in
rounds, so that all see the same machine:

latency    the server answers a tiny push after a pause; how long after the answer was sent does the worker have it?
           (all ranks are on one machine, so that they share a clock)
share      processor time over wall time of a rank that waits: of that worker during the longest pauses, and of the
           server while both workers compute (three ranks on two cores: what it takes, it takes from them)
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

import stalempi
from stalempi.transport import backoff
from stalempi.transport.backoff import Backoff
from stalempi.transport.base import Packet, Parts, ServerEnd, Transport, WorkerEnd
from stalempi.transport.message import HEADER_BYTES, Header, Kind

ROUNDS = 5
# pause before the answer (s): number of answers in a round
PAUSES = {0.0: 200, 0.002: 60, 0.02: 20, 0.2: 2}
COMPUTE = 0.5
LONG = 60.0
SETTINGS = {
    "spin for ever": Backoff(spin=math.inf),
    "spin 1 ms, sleep 20 us to 1 ms, growing by 1.2 (default)": Backoff(),
    "the same, growing by 2": Backoff(growth=2.0),
    "the same, spin 5 ms": Backoff(spin=5e-3),
    "the same, no spin": Backoff(spin=0.0),
    "the same, sleep up to 0.2 ms": Backoff(longest=2e-4),
    "the same, sleep up to 5 ms": Backoff(longest=5e-3),
    "no spin, sleep 1 ms": Backoff(spin=0.0, shortest=1e-3),
}


@dataclass
class Measured:
    """What worker 0 measured under one setting: latencies (s) by pause, and its share of a core while it waited."""

    latencies: dict[float, list[float]] = field(default_factory=lambda: {pause: [] for pause in PAUSES})
    shares: list[float] = field(default_factory=list)


def use(setting: Backoff) -> None:
    """Makes every wait of this rank from now on one with this backoff."""
    options = {name: getattr(setting, name) for name in ("spin", "shortest", "longest", "growth", "eager")}
    vars(backoff)["Backoff"] = functools.partial(Backoff, **options)


class Server:
    """Answers each push after a pause, with the time at which it did."""

    def __init__(self, transport: Transport) -> None:
        self.packets = [Packet(HEADER_BYTES, Parts([torch.zeros(8, dtype=torch.uint8)])) for _ in range(2)]
        self.headers = [bytearray(HEADER_BYTES) for _ in self.packets]
        self.end: ServerEnd = transport.server_end(self.packets, self.headers)
        self.sent = torch.zeros(1, dtype=torch.float64)
        self.parts = Parts([self.sent.view(torch.uint8)])

    def answer(self, count: int, pause: float = 0.0) -> None:
        """Waits for `count` pushes and answers each `pause` seconds later."""
        while count > 0:
            arrived = self.end.receive(LONG)
            assert arrived, "no push came"
            for worker in arrived:
                time.sleep(pause)
                self.end.settle(self.parts, LONG)
                self.sent[0] = time.monotonic()
                Header(Kind.RELEASE, sender=0, layout=0, step=0, nbytes=8).pack_into(self.headers[worker])
                self.end.release(worker, self.parts)
            count -= len(arrived)

    def close(self) -> None:
        """Takes the leaves of both workers."""
        left = 0
        while left < 2:
            left += len(self.end.receive(LONG))
        self.end.close(LONG)


class Worker:
    """Pushes eight bytes and waits for eight."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.sent: NDArray[np.float64] = np.zeros(1)
        received = Parts([torch.from_numpy(self.sent).view(torch.uint8)])
        self.push = Packet(HEADER_BYTES, Parts([torch.zeros(8, dtype=torch.uint8)]))
        self.end: WorkerEnd = transport.worker_end(self.push, Packet(HEADER_BYTES, received))

    def ask(self) -> float:
        """Returns seconds from the sending of the answer to its arrival."""
        Header(Kind.PUSH, sender=self.rank, layout=0, step=0, samples=1, nbytes=8).pack_into(self.push.header)
        self.end.push()
        assert self.end.receive(LONG)
        return time.monotonic() - float(self.sent[0])

    def close(self) -> None:
        """Leaves."""
        Header(Kind.LEAVE, sender=self.rank, layout=0, step=0).pack_into(self.push.header)
        self.end.leave(LONG)
        self.end.close()


def compute(seconds: float) -> None:
    """Computes for `seconds`."""
    a, ends = torch.randn(96, 96), time.monotonic() + seconds
    while time.monotonic() < ends:
        a = torch.tanh(a @ a)


def serve(transport: Transport, server: Server) -> dict[str, list[float]]:
    """Plays the server's part of every round; returns its shares of a core while both workers computed."""
    shares: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(ROUNDS):
        for name, setting in SETTINGS.items():
            use(setting)
            meet(transport)
            for pause, count in PAUSES.items():
                server.answer(count, pause)
            meet(transport)
            began, used = time.monotonic(), time.process_time()
            server.answer(2)
            shares[name].append((time.process_time() - used) / (time.monotonic() - began))
    return shares


def work(transport: Transport, worker: Worker) -> dict[str, Measured]:
    """Plays a worker's part of every round; only worker 0 asks while latencies are measured."""
    found = {name: Measured() for name in SETTINGS}
    for _ in range(ROUNDS):
        for name, setting in SETTINGS.items():
            use(setting)
            meet(transport)
            if worker.rank == 1:
                measure_waiting(worker, found[name])
            else:
                use(Backoff(spin=0.0, shortest=5e-3, longest=5e-3))  # out of the way while it waits for the others
            meet(transport)
            use(setting)
            compute(COMPUTE)
            worker.ask()
    return found


def measure_waiting(worker: Worker, found: Measured) -> None:
    """Asks again and again; the share of a core is that of the longest waits."""
    for pause, count in PAUSES.items():
        began, used = time.monotonic(), time.process_time()
        found.latencies[pause] += [worker.ask() for _ in range(count)]
        share = (time.process_time() - used) / (time.monotonic() - began)
    found.shares.append(share)


def meet(transport: Transport) -> None:
    """Returns when all ranks are here."""
    transport.allgather(b"", LONG)


def report(found: dict[str, Measured], of_server: dict[str, list[float]]) -> None:
    """Prints the table: medians, and the 95th percentile of all latencies after a pause."""
    pauses = [f"after {1e3 * pause:g} ms" for pause in PAUSES]
    print("| waiting | " + " | ".join(pauses) + " | worker's share | server's share |")
    print("| --- |" + " ---: |" * (len(PAUSES) + 2))
    for name, measured in found.items():
        cells = [
            f"{1e6 * statistics.median(seconds):.0f} / {1e6 * float(np.quantile(seconds, 0.95)):.0f}"
            for seconds in measured.latencies.values()
        ]
        shares = [statistics.median(measured.shares), statistics.median(of_server[name])]
        print(f"| {name} | " + " | ".join([*cells, *(f"{share:.1%}" for share in shares)]) + " |")


def main() -> None:
    context = stalempi.init()
    torch.set_num_threads(1)
    transport = context.transport
    if context.is_server:
        server = Server(transport)
        shares = serve(transport, server)
        transport.allgather(json.dumps(shares).encode(), LONG)
        server.close()
        return
    worker = Worker(transport)
    found = work(transport, worker)
    of_server = json.loads(transport.allgather(b"", LONG)[0])
    worker.close()
    if context.rank == 1:
        report(found, of_server)


if __name__ == "__main__":
    main()
