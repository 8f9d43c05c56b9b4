"""Servers work at the same time, keep one set of books, and none waits without an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from stalempi.errors import StallError
from stalempi.follower import Follower
from stalempi.holder import ServerOptions
from stalempi.orders import Order
from stalempi.pipeline.link import Lane, Sender
from stalempi.policy import ASP, BSP
from stalempi.replica import Replica
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport.inproc import InprocTransport

from .job import run_job
from .small import data, make_model, momentum, step

torch.set_num_threads(1)
TIMEOUT = 100.0


def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
    for number in range(4):
        step(model, optimizer, *data(5, 10 * worker + number))


def test_servers_step_at_the_same_time() -> None:
    both = threading.Barrier(2)

    class Meets(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            both.wait(10)
            super().step()

    done = run_job(make_model, lambda model: Meets(model.parameters(), lr=0.1), BSP(), train, workers=2, servers=2)
    assert done.stats.updates == 4


@pytest.mark.parametrize("overlap", ["hooks", "off"])
def test_what_was_pushed_is_counted_over_all_servers(overlap: str) -> None:
    def pushed(servers: int) -> list[tuple[int, float]]:
        done = run_job(make_model, momentum, ASP(), train, workers=2, servers=servers, bucket_bytes=64, overlap=overlap)
        return [(worker.bytes_pushed, worker.hidden) for worker in done.stats.workers]

    one, several = pushed(1), pushed(2)
    assert [nbytes for nbytes, _ in several] == [nbytes for nbytes, _ in one]
    for (_, ours), (_, theirs) in zip(several, one, strict=True):
        assert ours == pytest.approx(theirs)
        assert (ours > 1) == (overlap == "hooks")  # in three of four steps


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def served(clock: Clock) -> Iterator[tuple[Sender, list[BaseException], threading.Thread]]:
    """Runs server 1 of 2; yields where its orders go in, and what it has raised."""
    transports = InprocTransport.group(3)
    model, raised = make_model(), list[BaseException]()
    replica = Replica(model, momentum(model), bucket_bytes=64, share=(1, 2))
    options = ServerOptions(stall_timeout=TIMEOUT, now=clock, workers=[2])
    follower = Follower(replica, transports[1], transports[1], options=options)

    def serve() -> None:
        try:
            follower.serve()
        except StallError as error:
            raised.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield transports[0].sender(1, Lane.ORDER, 1, timeout=1.0), raised, thread
    thread.join(5)
    assert not thread.is_alive()


def test_a_part_that_does_not_come_is_waited_for_from_its_order_on() -> None:
    clock = Clock()
    with served(clock) as (orders, raised, thread):
        clock.now = 0.9 * TIMEOUT  # nobody had anything to say
        time.sleep(0.8)
        orders.send((0, 0), [torch.tensor([Order.TAKE, 1, 0])])
        time.sleep(0.8)
        clock.now = 1.5 * TIMEOUT
        time.sleep(0.8)
        assert thread.is_alive()
        clock.now = 2.1 * TIMEOUT
    assert "server 1: rank 0 has a push of rank 2 whose part for this server did not come" in str(raised[0])


def test_a_rank_0_that_says_nothing_is_not_waited_for_for_ever() -> None:
    clock = Clock()
    with served(clock) as (_, raised, thread):
        clock.now = 1.5 * TIMEOUT  # a worker may be that silent, of which rank 0 tells
        time.sleep(0.8)
        assert thread.is_alive()
        clock.now = 2.5 * TIMEOUT
    assert "server 1: nothing from rank 0 in 200 s" in str(raised[0])
