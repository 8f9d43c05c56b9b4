"""Is one rank of doctor's own job: says where it is and measures the way to every other rank.

    mpirun -n 4 python -m stalempi.bench.diagnose.ranks

Rank 0 prints one line that begins with MARK and holds what all ranks found.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import re
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from stalempi.bench.diagnose.library import vendor_of
from stalempi.bench.diagnose.rounds import partners
from stalempi.errors import ConfigError
from stalempi.version import __version__

__all__ = ["MARK", "look", "main"]

MARK = "STALEMPI-DOCTOR "
_DEADLINE = 20.0  # seconds until a partner counts as silent
_SMALL, _LARGE = 40, 4  # exchanges of 8 bytes and of 1 MiB


def look() -> list[dict[str, Any]]:
    """Returns on rank 0 what every rank found; on the others an empty list. Every rank of the job calls it.

    Raises ConfigError where MPI could only abort.
    """
    try:
        import mpi4py  # noqa: PLC0415 - may be missing, which is for us to say

        mpi4py.rc.initialize = False
        from mpi4py import MPI  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"mpi4py does not work ({error}): run stalempi-bench doctor without a launcher") from None
    library = vendor_of(MPI.Get_library_version())
    if "OMPI_COMM_WORLD_SIZE" in os.environ and library.name != "openmpi":
        raise ConfigError(f"Open MPI's launcher started this, but mpi4py uses {library.title}: use the mpirun of that")
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    atexit.register(MPI.Finalize)  # mpi4py leaves the end to whom it left the start
    from stalempi.transport.mpi import MpiTransport  # noqa: PLC0415 - imports MPI

    comm = MPI.COMM_WORLD.Dup()
    local: Any = comm.Split_type(MPI.COMM_TYPE_SHARED)
    mine = _report(comm.Get_rank(), comm.Get_size(), local.Get_rank(), MPI.Get_library_version())
    mine["host"] = MPI.Get_processor_name()
    transport = MpiTransport(comm)
    transport.allgather(b"here", _DEADLINE)  # nobody measures before all have come
    mine["pairs"] = _measure(comm, MPI)
    everything = [json.loads(data) for data in transport.allgather(json.dumps(mine).encode(), 60 + comm.Get_size())]
    return everything if comm.Get_rank() == 0 else []


def _report(rank: int, size: int, local_rank: int, library: str) -> dict[str, Any]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "rank": rank,
        "size": size,
        "local_rank": local_rank,
        "cores": sorted(os.sched_getaffinity(0)),
        "cores_there": os.cpu_count() or 1,
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "gpu": _gpu_name(local_rank % count) if count else "",
        "versions": {
            "stalempi": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "MPI": " ".join(re.split("[\n,]", library.strip("\x00"), maxsplit=1)[0].split()),
        },
    }


def _gpu_name(number: int) -> str:
    """Names a GPU so that two ranks that share one say the same."""
    properties = torch.cuda.get_device_properties(number)
    return f"{properties.name} {getattr(properties, 'uuid', number)}"


def _measure(comm: Any, mpi: Any) -> dict[str, list[float]]:
    """Meets every other rank once; returns for those of higher rank [us there and back, GB/s], [] if it was silent."""
    found: dict[str, list[float]] = {}
    rank = comm.Get_rank()
    for partner in partners(rank, comm.Get_size()):
        times: dict[int, float] = {}
        for nbytes, count in ((8, _SMALL), (1 << 20, _LARGE)):
            seconds = _exchange(comm, mpi, partner, nbytes, count)
            if seconds is None:
                break
            times[nbytes] = seconds
        if partner > rank:
            found[str(partner)] = [1e6 * times[8], 2 * 2**20 / times[1 << 20] / 1e9] if len(times) == 2 else []
    return found


def _exchange(comm: Any, mpi: Any, partner: int, nbytes: int, count: int) -> float | None:
    """Sends bytes there and back `count` times; returns the median seconds, or None if the partner is silent."""
    out, back = np.zeros(nbytes, dtype=np.uint8), np.empty(nbytes, dtype=np.uint8)
    first = comm.Get_rank() < partner
    times = []
    for _ in range(count):
        began = time.perf_counter()
        receive = comm.Irecv(back, source=partner, tag=1)
        if not first and not _done([receive], mpi):
            return None
        send = comm.Isend(out, dest=partner, tag=1)
        if not _done([send, receive] if first else [send], mpi):
            return None
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _done(requests: list[Any], mpi: Any) -> bool:
    until = time.perf_counter() + _DEADLINE
    while not mpi.Request.Testall(requests):
        if time.perf_counter() > until:
            return False
        os.sched_yield()
    return True


def main() -> None:
    """Prints what was found, on rank 0."""
    if found := look():
        sys.stdout.write(MARK + json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
