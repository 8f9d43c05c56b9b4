"""The server refuses a push that cannot be what it claims, with worker and step, before it changes anything."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from stalempi.errors import NonFiniteError, ProtocolError, StallError
from stalempi.policy import ASP, BSP, Decision, Event, Policy
from stalempi.replica import Replica
from stalempi.server import Server, ServerOptions
from stalempi.transport.base import Packet, WorkerEnd
from stalempi.transport.inproc import InprocTransport
from stalempi.transport.message import HEADER_BYTES, Flag, Header, Kind

from .small import make_model, momentum

torch.set_num_threads(1)


class Peer:
    """A worker that sends whatever a test wants; what it sends waits until the server serves."""

    def __init__(self, transport: InprocTransport) -> None:
        model = make_model()
        self.rank = transport.rank
        self.replica = Replica(model, momentum(model), bucket_bytes=1 << 20)
        self.gradients = self.replica.params.like()
        self.packet = self.replica.push_packet(self.replica.wire(self.gradients), self.replica.buffers)
        self.replica.hyper(self.packet.header)[:] = self.replica.read_hyper()
        self.replica.touched(self.packet.header)[:] = True
        release = Packet(HEADER_BYTES, self.replica.release_parts())
        self.end: WorkerEnd = transport.worker_end(self.packet, release)

    def push(self, step: int, *, samples: int = 4, layout: int | None = None, flags: Flag = Flag.NONE) -> None:
        self._pack(Kind.PUSH, step, samples, layout, flags)
        self.end.push()

    def leave(self, step: int) -> None:
        self._pack(Kind.LEAVE, step, 0, None, Flag.NONE)
        self.end.leave(1.0)

    def receive_and_leave(self) -> None:
        assert self.end.receive(5.0)
        self.leave(1)

    def _pack(self, kind: Kind, step: int, samples: int, layout: int | None, flags: Flag) -> None:
        nbytes = self.packet.parts.nbytes if kind is Kind.PUSH else 0
        layout = self.replica.layout if layout is None else layout
        Header(kind, self.rank, layout, step, samples=samples, nbytes=nbytes, flags=flags).pack_into(self.packet.header)


def soon(nonfinite: str = "raise") -> ServerOptions:
    """Returns options under which a server that waits in vain gives up at once."""
    return ServerOptions(nonfinite=nonfinite, stall_warning=1.0, stall_timeout=2.0)


def make(
    policy: Policy,
    workers: int,
    options: ServerOptions | None = None,
    *,
    after: Callable[[list[Peer]], None] | None = None,
) -> tuple[Server, list[Peer]]:
    """Returns a server and its peers; `after` is called once, when the first event has been handled."""
    peers: list[Peer] = []
    todo = [after] if after else []

    def observe(event: Event, decisions: list[Decision]) -> None:
        del event, decisions
        if todo:
            todo.pop()(peers)

    transports = InprocTransport.group(workers + 1)
    model = make_model()
    replica = Replica(model, momentum(model), bucket_bytes=1 << 20)
    server = Server(replica, policy, transports[0], options=options or soon(), observe=observe)
    peers += [Peer(transport) for transport in transports[1:]]
    return server, peers


def assert_untouched(server: Server) -> None:
    assert (server.stats.updates, server.stats.samples) == (0, 0)
    for ours, first in zip(server.replica.model.parameters(), make_model().parameters(), strict=True):
        assert torch.equal(ours, first)


@pytest.mark.parametrize("step", [0, 2, 7])
def test_a_step_out_of_order_is_refused(step: int) -> None:
    server, (peer,) = make(ASP(), 1)
    peer.push(step)
    with pytest.raises(ProtocolError, match=f"worker 0 sent step {step} after step 0"):
        server.serve()
    assert_untouched(server)


def test_a_layout_that_was_not_agreed_on_is_refused() -> None:
    server, (peer,) = make(ASP(), 1)
    peer.push(1, layout=12345)
    with pytest.raises(ProtocolError, match="worker 0 step 1: its layout is not the one agreed on"):
        server.serve()
    assert_untouched(server)


def test_a_gradient_that_stands_for_no_samples_is_refused() -> None:
    server, (peer,) = make(ASP(), 1)
    peer.push(1, samples=0)
    with pytest.raises(ProtocolError, match="worker 0 step 1: its gradient stands for no samples"):
        server.serve()
    assert_untouched(server)


def test_a_second_push_without_a_release_is_refused() -> None:
    server, (first, _) = make(BSP(), 2, after=lambda peers: peers[0].push(2))
    first.push(1)
    with pytest.raises(ProtocolError, match="worker 0 pushed twice without a release in between"):
        server.serve()
    assert_untouched(server)


@pytest.mark.parametrize("again", [lambda peer: peer.push(1), lambda peer: peer.leave(0)], ids=["push", "leave"])
def test_nothing_is_taken_from_a_worker_that_has_left(again: Callable[[Peer], None]) -> None:
    server, (first, _) = make(ASP(), 2, after=lambda peers: again(peers[0]))
    first.leave(0)
    with pytest.raises(ProtocolError, match="worker 0 is not, or no longer, in a group of 2"):
        server.serve()
    assert_untouched(server)


def test_a_gradient_flagged_as_not_finite_ends_the_run_or_counts_nowhere() -> None:
    server, (peer,) = make(ASP(), 1)
    peer.push(1, flags=Flag.NONFINITE)
    with pytest.raises(NonFiniteError, match=r"worker 0 .* at step 1"):
        server.serve()
    assert_untouched(server)
    server, (peer,) = make(ASP(), 1, soon("skip"), after=lambda peers: peers[0].receive_and_leave())
    peer.push(1, flags=Flag.NONFINITE)
    stats = server.serve()
    assert (stats.workers[0].nonfinite, stats.workers[0].applied, stats.workers[0].samples) == (1, 0, 0)
    assert_untouched(server)


def test_silence_is_measured_by_the_clock_that_the_server_was_given() -> None:
    times = itertools.count(1000.0, 700.0)
    server, _ = make(ASP(), 2, ServerOptions(now=lambda: next(times)))
    with pytest.raises(StallError, match=r"worker 0 \(rank 1\) has been silent for 700 s since step 0"):
        server.serve()
