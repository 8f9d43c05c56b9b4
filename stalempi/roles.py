"""Says what each rank of a job is."""

from __future__ import annotations

from dataclasses import dataclass

from stalempi.errors import ConfigError

__all__ = ["SERVER_RANK", "Role", "assign_block", "assign_role", "without_server"]

SERVER_RANK = 0


@dataclass(frozen=True, slots=True)
class Role:
    """What one rank does: the first ranks serve, the last may evaluate, the others compute, in groups.

    A group is one worker for the server and its policy. Its first rank leads: the others push to it, and it pushes
    their sum. A worker of one rank leads itself.

    Attributes:
        rank: this rank's place in the job.
        num_workers: workers in the whole job, each a group.
        group_size: ranks in each group.
        evaluator_rank: the rank that evaluates; None if there is none.
        block: the block of the model that is pinned to this rank, in a model-parallel job; None in another.
        replica: which copy of the pipeline this rank belongs to.
        servers: ranks that serve, each with a share of the parameters; the first decides. 0: all compute.
    """

    rank: int
    num_workers: int
    group_size: int = 1
    evaluator_rank: int | None = None
    block: int | None = None
    replica: int = 0
    servers: int = 1

    def __str__(self) -> str:
        if self.block is not None:
            return f"block {self.block}" + (f" of replica {self.replica}" if self.replica else "")
        if self.is_server:
            return f"server {self.rank}" if self.servers > 1 else "server"
        if self.is_evaluator:
            return "evaluator"
        return f"worker {self.worker_rank}" + (f", member {self.group_rank}" if self.group_size > 1 else "")

    @property
    def is_server(self) -> bool:
        """Whether this rank holds parameters, or a share of them; rank 0 also decides who may go on."""
        return self.rank < self.servers and self.block is None

    @property
    def is_evaluator(self) -> bool:
        """Whether this rank tests the model while the others train it."""
        return self.rank == self.evaluator_rank

    @property
    def worker_rank(self) -> int | None:
        """The number of this rank's worker, 0 .. num_workers - 1; None on a rank that does not compute."""
        return None if self.shard_rank is None else self.shard_rank // self.group_size

    @property
    def group_rank(self) -> int | None:
        """Place in its group, 0 leads; None on a rank that does not compute."""
        return None if self.shard_rank is None else self.shard_rank % self.group_size

    @property
    def shard_rank(self) -> int | None:
        """Number among the ranks that compute, 0 .. num_shards - 1: each has data of its own; else None."""
        is_computing = not (self.is_server or self.is_evaluator or self.block is not None)
        return self.rank - self.servers if is_computing else None

    @property
    def num_shards(self) -> int:
        """Ranks that compute."""
        return self.num_workers * self.group_size

    @property
    def pushes_to(self) -> int:
        """The rank that takes this rank's pushes (or, from an evaluator, its figures)."""
        return SERVER_RANK if not self.group_rank else self.rank - self.group_rank

    @property
    def takes_from(self) -> range:
        """The ranks whose pushes this rank takes: the leaders for the server, the other members for a leader."""
        if self.is_server:
            return range(self.servers, self.servers + self.num_shards, self.group_size)
        return range(self.rank + 1, self.rank + self.group_size) if self.group_rank == 0 else range(0)


def assign_role(rank: int, size: int, *, group: int = 1, evaluator: bool = False, servers: int = 1) -> Role:
    """Returns the role of `rank` in a job of `size` ranks, the first `servers` of which serve, `group` to a worker.

    Raises ConfigError if there is no room for the servers and a worker (and an evaluator), if the ranks that compute do
    not divide into groups, or where several servers cannot be.
    """
    if group < 1:
        raise ConfigError(f"group={group}: a worker has at least 1 rank")
    if servers < 1:
        raise ConfigError(f"servers={servers}: a job has at least 1 server (without any: the policy allreduce)")
    if servers > 1 and group > 1:
        raise ConfigError(f"servers={servers}, group={group}: groups go with one server only: leave one of them out")
    others = servers + evaluator
    if size <= others:
        also = ", and one evaluator" if evaluator else ""
        these = "one server" if servers == 1 else f"{servers} servers"
        raise ConfigError(
            f"a job needs at least {others + 1} ranks, {these} and one worker{also}, but this one has {size}: "
            f"start it with mpirun -n {others + 1} or more"
        )
    workers, left = divmod(size - others, group)
    if left:
        fits = " or ".join(str(others + n * group) for n in (workers, workers + 1) if n)
        raise ConfigError(
            f"{size - others} computing ranks do not divide into groups of {group}: start {fits} ranks in all"
        )
    return Role(rank, workers, group, size - 1 if evaluator else None, servers=servers)


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
    return Role(rank, num_workers=0, block=rank % blocks, replica=rank // blocks, servers=0)


def without_server(rank: int, size: int) -> Role:
    """Returns the role of `rank` where every rank works."""
    return Role(rank, num_workers=size, servers=0)
