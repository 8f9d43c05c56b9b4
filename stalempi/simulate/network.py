"""Says when messages arrive: latency, the server's link in each direction, and the server, one message at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stalempi.errors import ConfigError

__all__ = ["Network", "Wire"]


@dataclass(frozen=True)
class Network:
    """What messages cost; by default nothing.

    Attributes:
        latency: seconds that a message travels, each way.
        bandwidth: bytes per second of the server's link, in each direction.
        push_bytes, release_bytes: sizes of a gradient and of the parameters.
        service: seconds that the server works on a push before what follows it (releases, the next push).
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    push_bytes: int = 0
    release_bytes: int = 0
    service: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency", "push_bytes", "release_bytes", "service"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be 0 or more, got {value}")
        if not self.bandwidth > 0:
            raise ConfigError(f"bandwidth must be above 0 bytes/s, got {self.bandwidth:g}")


class Wire:
    """Joins the workers to the server over a network.

        worker --latency--> [link in] --> [server] --> [link out] --latency--> worker

    Each box takes one message at a time, in the order in which they were sent: all have the same latency. So the
    caller hands over pushes in the order of their sending, and asks for releases in the order of the decisions.
    """

    def __init__(self, network: Network) -> None:
        self._latency, self._service = network.latency, network.service
        self._push_seconds = network.push_bytes / network.bandwidth
        self._release_seconds = network.release_bytes / network.bandwidth
        self._in_free = self._server_free = self._out_free = -math.inf

    def push(self, sent: float) -> float:
        """Returns when the server takes up a push sent at `sent` (s)."""
        came = max(self._in_free, sent + self._latency) + self._push_seconds
        self._in_free = came
        now = max(came, self._server_free)
        self._server_free = now + self._service
        return now

    def leave(self, sent: float) -> float:
        """Returns when the server takes up a leave sent at `sent` (s): no bytes, no work."""
        now = max(self._in_free, sent + self._latency, self._server_free)
        self._in_free = self._server_free = now
        return now

    def release(self, *, empty: bool = False) -> float:
        """Returns when a worker has the release that the server sends after the message it works on (s)."""
        went = max(self._out_free, self._server_free)
        if not empty:
            went += self._release_seconds
        self._out_free = went
        return went + self._latency
