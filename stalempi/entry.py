"""Joins the parts that know no MPI to MPI: the start and the end of every program."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stalempi import context, preempt
from stalempi.context import Context
from stalempi.errors import ConfigError
from stalempi.logs import log_to_stderr, logger
from stalempi.peers import Peers
from stalempi.roles import Role, assign_block, assign_role
from stalempi.silence import default_stall_timeout

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["init", "parse_device", "shutdown"]

# Each launcher tells its ranks how many it started; only used to notice that MPI does not see them.
_LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def init(  # noqa: PLR0913 - the one place where a user says what the job is
    comm: MPI.Intracomm | None = None,
    *,
    device: str | torch.device | None = None,
    pipeline: bool = False,
    group: int = 1,
    evaluator: bool = False,
    servers: int = 1,
    grace: float = 60.0,
) -> Context:
    """Starts stalempi on this rank; every rank of `comm` calls it, before anything touches a GPU.

    Args:
        comm: the ranks of the job, rank 0 the server; MPI.COMM_WORLD by default. It is duplicated, so that the
            caller's own messages never meet ours.
        device: where to compute: "cpu", "cuda", "cuda:N"; by default the GPU number local_rank % GPUs where there is
            one, else the CPU.
        pipeline: whether every rank is to hold a block of a model, instead of a server and its workers.
        group: ranks that make one worker: they sum their gradients and push once.
        evaluator: whether the last rank tests the model while the others train it.
        servers: ranks that serve, 0 .. servers - 1, each with a share of the parameters; rank 0 alone decides.
        grace: seconds after SIGTERM or SIGUSR1 within which the job has to save and stop (exit code 75).

    From here on an uncaught exception on any rank ends the whole job. Returns the context; calling it again returns the
    same one.

    Raises ConfigError with too few ranks, with ranks that do not divide into groups, or where the launch went wrong.
    """
    if context.is_initialized():
        return context.current()
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "stalempi.init() ran in a process of a data loader, which imports the script again: "
            'put the script\'s work under if __name__ == "__main__":'
        )
    mpi = _import_mpi()
    from stalempi import abort  # noqa: PLC0415 - imports MPI, which starts it
    from stalempi.transport.mpi import MpiTransport  # noqa: PLC0415
    from stalempi.transport.probe import choose_path  # noqa: PLC0415

    abort.install()
    preempt.install(preempt.check_grace(grace), abort.end)
    world = comm or mpi.COMM_WORLD
    _check_launch(world.Get_size())
    role = _choose_role(world, pipeline=pipeline, group=group, evaluator=evaluator, servers=servers)
    ours = world.Dup()
    computing: Any = ours.Split(mpi.UNDEFINED if role.shard_rank is None else 0, world.Get_rank())
    local: Any = ours.Split_type(mpi.COMM_TYPE_SHARED)
    found = Context(
        rank=ours.Get_rank(),
        size=ours.Get_size(),
        local_rank=local.Get_rank(),
        local_size=local.Get_size(),
        device=_choose_device(device, local.Get_rank()),
        role=role,
        transport=MpiTransport(ours),
        peers=None
        if role.shard_rank is None
        else Peers(MpiTransport(computing, first=servers), first=servers, timeout=default_stall_timeout()),
    )
    found.transport.direct, found.transport.buffers = choose_path(ours, found.device)
    _divide_threads(local)
    local.Free()
    context.set_current(found)
    if not logger.hasHandlers():  # a program that logs elsewhere has said so before
        log_to_stderr(found)
    return found


def _choose_role(world: MPI.Intracomm, *, pipeline: bool, group: int, evaluator: bool, servers: int) -> Role:
    rank, size = world.Get_rank(), world.Get_size()
    if not pipeline:
        return assign_role(rank, size, group=group, evaluator=evaluator, servers=servers)
    if group != 1 or evaluator or servers != 1:
        raise ConfigError("a pipeline has no groups, evaluator or servers: leave group, evaluator and servers out")
    return assign_block(rank, size)


def shutdown() -> None:
    """Ends stalempi on this rank; every rank calls it, if any does, and may `init` again afterwards."""
    if context.is_initialized():
        context.current().transport.close()
        if peers := context.current().peers:
            peers.close()
        context.set_current(None)


def _import_mpi() -> Any:
    try:
        import mpi4py  # noqa: PLC0415 - MPI starts when it is imported, which only init may cause
    except ImportError:
        raise ConfigError("mpi4py is missing: pip install mpi4py") from None
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.thread_level = "serialized"  # THREAD_MULTIPLE aborts on UCX built without it
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): load your site's MPI module, or "
            "pip install 'stalempi[mpi]'"
        ) from None
    return MPI


def _check_launch(size: int) -> None:
    """Notices a launch in which every rank believes to be alone."""
    for variable in _LAUNCHER_SIZES:
        started = os.environ.get(variable, "")
        if size > 1 or not started.isdigit() or int(started) < 2:
            continue
        cure = (
            "start it with srun --mpi=pmix (srun --mpi=list shows what there is) or with mpirun inside the allocation"
            if variable == "SLURM_NTASKS"
            else "use the mpirun of the MPI library that mpi4py uses"
        )
        raise ConfigError(f"{variable}={started}, but MPI sees a world of size 1, so each rank is alone: {cure}")


def parse_device(wanted: str | torch.device) -> torch.device:
    """Reads "cpu", "cuda" or "cuda:N"; ConfigError for anything else."""
    try:
        chosen = torch.device(wanted)
    except RuntimeError:
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {str(wanted)!r}")
    return chosen


def _choose_device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    chosen = parse_device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cpu":
        return chosen
    count = torch.cuda.device_count()
    if count == 0 or (chosen.index or 0) >= count:
        raise ConfigError(f"device {wanted} is not there: this node has {count} GPU(s) that torch can use; try cpu")
    if chosen.index is None:
        chosen = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(chosen)
    return chosen


def _divide_threads(local: MPI.Intracomm) -> None:
    """Gives each rank of a node its share of the cores that they may use together."""
    cores = np.zeros(max(os.cpu_count() or 1, 1 + max(os.sched_getaffinity(0))), dtype=np.uint8)
    cores[list(os.sched_getaffinity(0))] = 1
    together = np.zeros((local.Get_size(), len(cores)), dtype=np.uint8)
    local.Allgather(cores, together)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(together.any(axis=0).sum()) // local.Get_size()))
