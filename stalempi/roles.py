"""Says what each rank of a job is."""

from __future__ import annotations

from dataclasses import dataclass

from stalempi.errors import ConfigError

__all__ = ["SERVER_RANK", "Role", "assign_block", "assign_role", "without_server"]

SERVER_RANK = 0


@dataclass(frozen=True, slots=True)
class Role:
    """What one rank does.

    Attributes:
        is_server: whether this rank holds the parameters and decides who may go on.
        worker_rank: this worker's number, 0 .. num_workers - 1; None on the server.
        num_workers: workers in the whole job.
        block: the block of the model that is pinned to this rank, in a model-parallel job; None in another.
        replica: which copy of the pipeline this rank belongs to.
    """

    is_server: bool
    worker_rank: int | None
    num_workers: int
    block: int | None = None
    replica: int = 0

    def __str__(self) -> str:
        if self.block is not None:
            return f"block {self.block}" + (f" of replica {self.replica}" if self.replica else "")
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


def assign_block(rank: int, size: int, blocks: int | None = None) -> Role:
    """Returns the role of `rank` in a model-parallel job: blocks on consecutive ranks, replicas one after the other.

    Args:
        rank, size: place in the job and its ranks.
        blocks: that the model is cut into; None: as many as there are ranks.

    Raises ConfigError if the ranks do not divide into whole pipelines.
    """
    blocks = size if blocks is None else blocks
    if blocks < 1 or size % blocks:
        raise ConfigError(
            f"{size} rank(s) do not divide into pipelines of {blocks} block(s): start a multiple of {blocks} ranks"
        )
    return Role(is_server=False, worker_rank=None, num_workers=0, block=rank % blocks, replica=rank // blocks)


def without_server(rank: int, size: int) -> Role:
    """Returns the role of `rank` where every rank works."""
    return Role(is_server=False, worker_rank=rank, num_workers=size)
