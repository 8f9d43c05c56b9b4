"""Messages queue at the server's link, in each direction, and before the server itself."""

from __future__ import annotations

import math

import pytest

from stalempi.errors import ConfigError
from stalempi.policy import ASP
from stalempi.simulate.network import Link, Network, Wire
from stalempi.simulate.timing import Limit, simulate

from .runs import steady

# 1 s of latency, 2 s on the link for a push, 3 s for a release, 5 s of the server's work
SLOW = Network(latency=1.0, bandwidth=1.0, push_bytes=2, release_bytes=3, service=5.0)


def test_a_message_alone() -> None:
    """Sent at 10, at the link at 11, whole at 13 and taken up; worked on until 18, off the link at 21, there at 22."""
    wire = Wire(SLOW, 2)
    assert wire.push(wire.reach(0, 10.0)) == 13.0
    assert wire.release(0) == 22.0


def test_two_pushes_at_once_queue_at_the_link_and_at_the_server() -> None:
    """
    push     link in    server     link out   there
    a  0     1 - 3      3 - 8       8 - 11     12
    b  0     3 - 5      8 - 13     13 - 16     17
    """
    wire = Wire(SLOW, 2)
    assert (wire.push(wire.reach(0, 0.0)), wire.release(0)) == (3.0, 12.0)
    assert (wire.push(wire.reach(1, 0.0)), wire.release(1)) == (8.0, 17.0)


def test_two_releases_queue_at_the_link_out() -> None:
    wire = Wire(SLOW, 2)
    wire.push(wire.reach(0, 0.0))
    assert [wire.release(0), wire.release(1)] == [12.0, 15.0]


def test_an_empty_release_and_a_leave_take_no_time_on_the_link() -> None:
    wire = Wire(SLOW, 2)
    wire.push(wire.reach(0, 0.0))
    assert wire.release(0, empty=True) == 9.0
    assert wire.leave(wire.reach(0, 20.0, empty=True)) == 21.0


def test_a_network_is_free_by_default() -> None:
    wire = Wire(Network(), 1)
    assert (wire.push(wire.reach(0, 4.0)), wire.release(0)) == (4.0, 4.0)


def test_a_link_of_its_own_and_a_handshake() -> None:
    """Worker 1 is 2 s further away, on a link of 1 byte in 4 s, and asks for leave to send before it does.

    push     asks, may, goes    its link    link in    release   link out    goes      its link    there
    1  0     3     6    9       9 - 17     17 - 19     24        24 - 27    27 - 36    36 - 48      48
    """
    slow = Network(1.0, 1.0, 2, 3, 5.0, handshakes=1, links=(Link(), Link(2.0, 0.25)))
    wire = Wire(slow, 3)
    assert wire.push(wire.reach(1, 0.0)) == 19.0
    assert wire.release(1) == 48.0
    other = Wire(slow, 3)
    assert other.reach(1, 0.0, empty=True) == 3.0
    assert other.push(other.reach(2, 0.0)) == 5.0  # as worker 0: no link of its own


def test_whoever_reaches_the_server_first_is_taken_first() -> None:
    """Worker 0 sends first, over a slow link."""
    order: list[tuple[int, float]] = []
    far = Network(links=(Link(latency=1.5),))
    simulate(
        ASP(), steady(1.0, 2.0), limit=Limit(4.5), network=far, observe=lambda e, _: order.append((e.worker, e.now))
    )
    assert order == [(1, 2.0), (0, 2.5), (1, 4.0)]


def test_more_links_than_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 links for 1 worker"):
        Wire(Network(links=(Link(), Link())), 1)


@pytest.mark.parametrize("options", [{"latency": -1.0}, {"bandwidth": 0.0}, {"latency": math.inf}])
def test_a_link_that_cannot_be_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} of a link"):
        Link(**options)


def test_the_server_is_the_bottleneck_once_it_is_busy_all_the_time() -> None:
    """20 workers of 1 s each could make 20 pushes a second; a server that needs 0.1 s for each takes 10."""
    stats = simulate(ASP(), steady(*[1.0] * 20), limit=Limit(1000.0), network=Network(service=0.1))
    assert stats.updates / stats.seconds == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize(
    "options", [{"latency": -1.0}, {"bandwidth": 0.0}, {"service": math.inf}, {"push_bytes": -1}, {"latency": math.nan}]
)
def test_a_value_that_cannot_be_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Network(**options)  # type: ignore[arg-type]
