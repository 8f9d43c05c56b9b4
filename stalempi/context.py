"""Holds what `init` found out about this rank, for every part that needs to know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from stalempi.errors import ConfigError
from stalempi.peers import Peers
from stalempi.roles import Role, without_server
from stalempi.silence import default_stall_timeout
from stalempi.transport.base import Transport

__all__ = ["Context", "Job", "current", "is_initialized", "open_jobs", "set_current"]


@dataclass(frozen=True, slots=True)
class Context:
    """What this rank is and how it reaches the others.

    Attributes:
        rank, size: place in the job and number of ranks in it.
        local_rank, local_size: the same among the ranks of this node.
        device: where this rank computes; already the current device if it is a GPU.
        role: server, worker (or which member of one), or evaluator.
        transport: moves bytes between the ranks of this job.
        peers: the ranks that compute, for one of them; None on the server and the evaluator.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    role: Role
    transport: Transport
    peers: Peers | None = None

    @property
    def is_server(self) -> bool:
        """Whether this rank is the parameter server."""
        return self.role.is_server

    @property
    def worker_rank(self) -> int | None:
        """The number of this rank's worker, from 0; None on the server and the evaluator."""
        return self.role.worker_rank

    @property
    def is_evaluator(self) -> bool:
        """Whether this rank tests the model while the others train it."""
        return self.role.is_evaluator

    @property
    def num_workers(self) -> int:
        """Workers in the job, each a group of ranks."""
        return self.role.num_workers

    @property
    def group_rank(self) -> int | None:
        """Place of this rank in its worker, 0 leads; None on the server and the evaluator."""
        return self.role.group_rank

    @property
    def group_size(self) -> int:
        """Ranks in each worker."""
        return self.role.group_size

    @property
    def shard_rank(self) -> int | None:
        """Number of this rank among those that compute, from 0; None on the server and the evaluator."""
        return self.role.shard_rank

    @property
    def num_shards(self) -> int:
        """Ranks that compute: each takes a shard of the data."""
        return self.role.num_shards

    def without_server(self) -> Context:
        """Returns the same where every rank works; ConfigError in a job with groups, an evaluator or servers."""
        if self.group_size > 1 or self.role.evaluator_rank is not None or self.role.servers > 1:
            raise ConfigError(
                "without a server there are no groups, no evaluator and no servers: leave them out of stalempi.init()"
            )
        peers = Peers(self.transport, first=0, timeout=default_stall_timeout())
        return replace(self, role=without_server(self.rank, self.size), peers=peers)


class Job(Protocol):
    """Something that the other ranks count on until it is closed."""

    @property
    def step_count(self) -> int:
        """Steps taken so far, to say where a rank failed."""

    def finish(self) -> None:
        """Closes it at the end of the program if the user has not."""


open_jobs: list[Job] = []
_current: Context | None = None


def current() -> Context:
    """Returns the context of this rank; ConfigError before `stalempi.init()`."""
    if _current is None:
        raise ConfigError("stalempi is not initialised: call stalempi.init() first")
    return _current


def is_initialized() -> bool:
    """Returns whether `init` has been called (and `shutdown` has not)."""
    return _current is not None


def set_current(context: Context | None) -> None:
    """Makes `context` the one of this process."""
    global _current  # noqa: PLW0603 - one per process, as MPI itself is
    _current = context
