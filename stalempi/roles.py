"""Says what each rank of a job is."""

from __future__ import annotations

from dataclasses import dataclass

from stalempi.errors import ConfigError

__all__ = ["SERVER_RANK", "Role", "assign_role"]

SERVER_RANK = 0


@dataclass(frozen=True, slots=True)
class Role:
    """What one rank does.

    Attributes:
        is_server: whether this rank holds the parameters and decides who may go on.
        worker_rank: this worker's number, 0 .. num_workers - 1; None on the server.
        num_workers: workers in the whole job.
    """

    is_server: bool
    worker_rank: int | None
    num_workers: int

    def __str__(self) -> str:
        return "server" if self.is_server else f"worker {self.worker_rank}"


def assign_role(rank: int, size: int) -> Role:
    """Returns the role of `rank` in a job of `size` ranks: rank 0 serves, every other rank works.

    Raises ConfigError if there is no room for a server and a worker.
    """
    if size < 2:
        raise ConfigError(
            f"a job needs at least 2 ranks, one server and one worker, but this one has {size}: "
            "start it with mpirun -n 2 or more"
        )
    if rank == SERVER_RANK:
        return Role(is_server=True, worker_rank=None, num_workers=size - 1)
    return Role(is_server=False, worker_rank=rank - 1, num_workers=size - 1)
