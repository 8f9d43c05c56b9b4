"""A release that lingers keeps the parameters of its version, while the server updates others and waits for nobody."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from stalempi import master
from stalempi.master import MasterCopy
from stalempi.policy import ASP
from stalempi.replica import Replica
from stalempi.server import Server
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport.base import Parts
from stalempi.transport.inproc import InprocTransport, run_ranks
from stalempi.worker import Worker

from .job import make_context

torch.set_num_threads(1)

EVERY_DTYPE = [torch.float32, torch.float64]


class Network:
    """Says which releases are still being read, and remembers how long it was asked to wait."""

    def __init__(self) -> None:
        self.reading: list[Parts] = []
        self.patience: list[float] = []

    def settle(self, parts: Parts, seconds: float) -> bool:
        self.patience.append(seconds)
        return not any(parts is other for other in self.reading)


class Mixed(nn.Module):
    """Two parameters of different dtypes, so that there are two storages."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in EVERY_DTYPE])


def make() -> tuple[Replica, Network, MasterCopy]:
    model = Mixed()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1.0), bucket_bytes=64)
    network = Network()
    return replica, network, MasterCopy(replica, network.settle)


@torch.no_grad()
def update(replica: Replica, copy: MasterCopy) -> None:
    copy.make_room()
    for parameter in replica.trained:
        parameter.add_(1)


def content(parts: Parts) -> list[bytes]:
    return [bytes(tensor.numpy().tobytes()) for tensor in parts.tensors]


def addresses(replica: Replica) -> list[int]:
    return [storage.data_ptr() for storage in replica.params.storages]


def test_nothing_moves_while_no_release_is_on_its_way() -> None:
    replica, _, copy = make()
    before, parts = addresses(replica), copy.parts
    for _ in range(3):
        update(replica, copy)
    assert (copy.moves, addresses(replica)) == (0, before)
    assert copy.parts is parts


def test_a_lingering_release_keeps_its_values_and_the_update_goes_on_elsewhere() -> None:
    replica, network, copy = make()
    release, before = copy.parts, content(copy.parts)
    network.reading.append(release)
    update(replica, copy)
    assert copy.moves == 1
    assert content(release) == before
    assert copy.parts is not release
    assert all(bool((parameter == 2).all()) for parameter in replica.trained)
    for parameter, view in zip(replica.model.parameters(), replica.params.views, strict=True):
        assert parameter.data_ptr() == view.data_ptr()


def test_the_next_release_carries_what_was_updated() -> None:
    replica, network, copy = make()
    network.reading.append(copy.parts)
    update(replica, copy)
    sent = content(copy.parts)
    update(replica, copy)
    assert content(copy.parts) != sent
    received = replica.params.like()
    for mine, theirs in zip(received.buckets(64), copy.parts.tensors, strict=True):
        mine.copy_(theirs)
    assert all(bool((view == 3).all()) for view in received.views)


def test_a_storage_that_is_read_no_more_is_used_again() -> None:
    replica, network, copy = make()
    first, first_parts = addresses(replica), copy.parts
    network.reading = [copy.parts]
    update(replica, copy)
    second_parts = copy.parts
    network.reading = [second_parts]
    update(replica, copy)
    assert copy.moves == 2
    assert addresses(replica) == first
    assert copy.parts is first_parts
    assert all(bool((parameter == 3).all()) for parameter in replica.trained)


def test_as_many_storages_are_made_as_releases_linger_and_no_more() -> None:
    replica, network, copy = make()
    seen: set[int] = set()
    window: list[Parts] = []
    for _ in range(40):
        window = [*window, copy.parts][-3:]  # the three latest releases are still being read
        network.reading = window
        update(replica, copy)
        seen.add(addresses(replica)[0])
    assert copy.moves == 40
    assert len(seen) <= 4
    assert all(bool((parameter == 41).all()) for parameter in replica.trained)


def test_the_server_has_patience_only_with_the_release_in_its_way() -> None:
    replica, network, copy = make()
    network.reading = [copy.parts]
    update(replica, copy)
    network.patience.clear()
    network.reading.append(copy.parts)
    update(replica, copy)
    assert network.patience == [master._PATIENCE, 0.0]


def fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


@pytest.mark.parametrize("size", [8, 40_000], ids=["one bucket", "many buckets"])
def test_a_slow_receiver_gets_the_parameters_of_its_version_whole(size: int) -> None:
    """Each release is read 60 ms after it was sent; meanwhile the other worker's push is applied."""
    got: dict[int, list[tuple[int, Tensor]]] = {0: [], 1: []}
    masters: list[MasterCopy] = []
    begin = threading.Barrier(2)

    def main(transport: InprocTransport) -> None:
        context = make_context(transport)
        model = nn.Linear(size, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        wrapped = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(
            wrapped, model=model, policy=ASP(), context=context, bucket_bytes=1024, stall_timeout=20
        )
        if context.worker_rank is None:
            assert isinstance(optimizer._server, Server)
            masters.append(optimizer._server._master)
            optimizer.serve()
            return
        begin.wait(10)
        with optimizer:
            for _ in range(6):
                fill(model, -1.0)  # each update adds 1 to every element, so a value is a version
                optimizer.step(samples=1)
                assert isinstance(optimizer._worker, Worker)
                got[context.worker_rank].append((optimizer._worker.version, model.weight.detach().clone()))
                threading.Event().wait(0.025 * (1 + context.worker_rank))

    run_ranks(main, 3, delivery=0.06)
    for releases in got.values():
        assert len(releases) == 6
        assert [version for version, weight in releases if not bool((weight == version).all())] == []
    assert masters[0].moves > 0
