"""Holds what `init` found out about this rank, for every part that needs to know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from stalempi.errors import ConfigError
from stalempi.roles import Role, without_server
from stalempi.transport.base import Transport

__all__ = ["Context", "Job", "current", "is_initialized", "open_jobs", "set_current"]


@dataclass(frozen=True, slots=True)
class Context:
    """What this rank is and how it reaches the others.

    Attributes:
        rank, size: place in the job and number of ranks in it.
        local_rank, local_size: the same among the ranks of this node.
        device: where this rank computes; already the current device if it is a GPU.
        role: server or worker.
        transport: moves bytes between the ranks of this job.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    role: Role
    transport: Transport

    @property
    def is_server(self) -> bool:
        """Whether this rank is the parameter server."""
        return self.role.is_server

    @property
    def worker_rank(self) -> int | None:
        """The number of this worker, from 0; None on the server."""
        return self.role.worker_rank

    @property
    def num_workers(self) -> int:
        """Workers in the job."""
        return self.role.num_workers

    def without_server(self) -> Context:
        """Returns the same where every rank works."""
        return replace(self, role=without_server(self.rank, self.size))


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
