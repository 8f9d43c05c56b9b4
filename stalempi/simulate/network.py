"""Says when messages arrive: each worker's own link, the server's link in each direction, and the server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stalempi.errors import ConfigError

__all__ = ["Link", "Network", "Wire"]


@dataclass(frozen=True)
class Link:
    """One worker's way to the server's link.

    Attributes:
        latency: seconds that a message travels on it, each way.
        bandwidth: bytes per second, in each direction.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"latency of a link must be 0 or more, got {self.latency}")
        if not self.bandwidth > 0:
            raise ConfigError(f"bandwidth of a link must be above 0 bytes/s, got {self.bandwidth:g}")


@dataclass(frozen=True)
class Network:
    """What messages cost; by default nothing.

    Attributes:
        latency: seconds that a message travels, each way.
        bandwidth: bytes per second of the server's link, in each direction.
        push_bytes, release_bytes: sizes of a gradient and of the parameters.
        service: seconds that the server works on a push before what follows it (releases, the next push).
        handshakes: round trips that MPI makes before a message with contents goes off: 1 for large ones over TCP, by
            the rendezvous protocol; 0 for small ones, which are sent at once.
        links: the links of workers 0, 1, ...; those that it does not reach have one that costs nothing.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    push_bytes: int = 0
    release_bytes: int = 0
    service: float = 0.0
    handshakes: int = 0
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        for name in ("latency", "push_bytes", "release_bytes", "service", "handshakes"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be 0 or more, got {value}")
        if not self.bandwidth > 0:
            raise ConfigError(f"bandwidth must be above 0 bytes/s, got {self.bandwidth:g}")


class Wire:
    """Joins the workers to the server over a network.

        worker --its link, latency--> [link in] --> [server] --> [link out] --latency, its link--> worker

    Each box takes one message at a time, in the order in which they reach the server's link; a worker has one on its
    way. So the caller hands over messages in the order of `reach`, and asks for releases in the order of the decisions.
    A message is whole on one link before it is on the next.
    """

    def __init__(self, network: Network, num_workers: int) -> None:
        if len(network.links) > num_workers:
            raise ConfigError(f"there are {len(network.links)} links for {num_workers} worker(s)")
        self._service = network.service
        self._push_seconds = network.push_bytes / network.bandwidth
        self._release_seconds = network.release_bytes / network.bandwidth
        links = [*network.links, *[Link()] * (num_workers - len(network.links))]
        self._empty = [network.latency + link.latency for link in links]
        full = [(1 + 2 * network.handshakes) * travel for travel in self._empty]
        self._push = [there + network.push_bytes / link.bandwidth for there, link in zip(full, links, strict=True)]
        self._release = [back + network.release_bytes / link.bandwidth for back, link in zip(full, links, strict=True)]
        self._in_free = self._server_free = self._out_free = -math.inf

    def reach(self, worker: int, sent: float, *, empty: bool = False) -> float:
        """Returns when a message sent at `sent` (s) is at the server's link; `empty`: a leave."""
        return sent + (self._empty if empty else self._push)[worker]

    def push(self, reached: float) -> float:
        """Returns when the server takes up a push that reached its link at `reached` (s)."""
        came = max(self._in_free, reached) + self._push_seconds
        self._in_free = came
        now = max(came, self._server_free)
        self._server_free = now + self._service
        return now

    def leave(self, reached: float) -> float:
        """Returns when the server takes up a leave that reached its link at `reached` (s): no bytes, no work."""
        now = max(self._in_free, reached, self._server_free)
        self._in_free = self._server_free = now
        return now

    def release(self, worker: int, *, empty: bool = False) -> float:
        """Returns when `worker` has the release that the server sends after the message it works on (s)."""
        went = max(self._out_free, self._server_free)
        if not empty:
            went += self._release_seconds
        self._out_free = went
        return went + (self._empty if empty else self._release)[worker]
