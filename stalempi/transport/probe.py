"""Tries whether a message from the memory of a GPU arrives, and chooses the path that messages take."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from stalempi.errors import ConfigError
from stalempi.transport.backoff import wait_for
from stalempi.transport.cuda_aware import OVERRIDE, Answer, ask, query_library
from stalempi.transport.message import Tag
from stalempi.transport.staging import copier_for

__all__ = ["choose_path", "probe"]

_PROBES = (64, 1 << 20)  # bytes: below and above where libraries change how they send
_TIMEOUT = 20.0

# Buffers of a probe that did not end in time: MPI may still write to them.
_lost: list[object] = []


def probe(comm: MPI.Intracomm, make: Callable[[int], Tensor], *, timeout: float = _TIMEOUT) -> bool:
    """Sends tensors to the next rank of a ring and takes some from the rank before; every rank of `comm` calls it.

    Args:
        comm: nobody else uses it meanwhile.
        make: returns a uint8 tensor of so many elements, in the memory to be tried.
        timeout: seconds that each may take.

    Returns whether what was to come has come whole, and what was sent has gone.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    neighbours = (rank + 1) % size, (rank - 1) % size
    tries = [
        _try(comm, make, count, neighbours, timeout) for count in _PROBES
    ]  # each of them, as every other rank does
    return all(tries)


def _try(
    comm: MPI.Intracomm, make: Callable[[int], Tensor], count: int, neighbours: tuple[int, int], timeout: float
) -> bool:
    after, before = neighbours
    sent, got = make(count), make(count)
    pattern = torch.arange(count, dtype=torch.int64).remainder(251).to(torch.uint8)
    sent.copy_(pattern + comm.Get_rank() % 5)
    got.zero_()
    copier_for(sent.device).mark().synchronize()
    requests: Any = [comm.Irecv(got, source=before, tag=Tag.PROBE), comm.Isend(sent, dest=after, tag=Tag.PROBE)]
    if not wait_for(lambda: bool(MPI.Request.Testall(requests)), timeout, lambda: True):
        _lost.append((requests, sent, got))
        return False
    return torch.equal(got.cpu(), pattern + before % 5)


def choose_path(
    comm: MPI.Intracomm, device: torch.device, *, answer: Answer | None = None, timeout: float = _TIMEOUT
) -> tuple[bool, str]:
    """Returns whether this rank sends from its device's memory as it is, and the path in words; every rank calls it.

    `answer` stands in for `ask`. Raises ConfigError if STALEMPI_CUDA_AWARE=1 and the probe shows otherwise.
    """
    on_gpu = device.type != "cpu"
    if answer is None:
        answer = ask(os.environ, MPI.Get_library_version(), query_library if on_gpu else lambda: False)
        answer = answer if on_gpu else Answer(False, "no GPU")
    hopes = np.zeros(comm.Get_size(), dtype=np.uint8)
    comm.Allgather(np.array([answer.aware], dtype=np.uint8), hopes)
    if not hopes.any():
        return False, _staged(answer.reason) if on_gpu else "host memory"
    memory = device if answer.aware else torch.device("cpu")
    arrived = probe(comm, lambda count: torch.empty(count, dtype=torch.uint8, device=memory), timeout=timeout)
    if not answer.aware:
        return False, _staged(answer.reason) if on_gpu else "host memory"
    if arrived:
        return True, f"GPU memory as it is ({answer.reason}, and a probe arrived)"
    if answer.reason.startswith(OVERRIDE):
        raise ConfigError(
            f"{answer.reason}, but a message from GPU memory did not arrive whole: unset it, or make it 0"
        )
    return False, _staged(f"{answer.reason}, but a probe did not arrive whole")


def _staged(reason: str) -> str:
    return f"GPU memory through pinned host memory ({reason})"
