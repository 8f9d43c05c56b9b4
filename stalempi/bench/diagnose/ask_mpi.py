"""Starts MPI in a process of its own and says what it is; run by its path, without the package, which needs torch.

    python ask_mpi.py [gpu]

Prints a JSON object after each step: a crash in one leaves those before it known. "gpu" sends a message from and to GPU
memory, which crashes where MPI is not CUDA-aware.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any


def say(**facts: Any) -> None:
    """Prints facts, at once."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def libraries() -> list[str]:
    """Returns the MPI libraries that are loaded in this process."""
    name = re.compile(r"/lib(p?mpi|mpich)(_abi|_cray|_gnu\w*|_intel\w*)?\.so[.\d]*$")
    words = [line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    return sorted({word for word in words if name.search(word)})


def cuda_support(paths: list[str]) -> int | None:
    """Returns what the library says of itself: 1, 0, or None if it cannot be asked."""
    for path in paths:
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return int(query())
    return None


def has_ulfm(comm: Any) -> bool:
    """Returns whether the library knows the calls of fault tolerance."""
    try:
        comm.Is_revoked()
    except (AttributeError, NotImplementedError):
        return False
    return True


def gpu_message(mpi: Any) -> bool:
    """Sends 1 MiB from GPU memory to GPU memory of this process and returns whether it arrived."""
    import torch  # noqa: PLC0415 - seconds, and only for this

    source = torch.arange(1 << 18, dtype=torch.float32, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    mpi.COMM_SELF.Sendrecv(source, 0, recvbuf=target, source=0)
    return bool(torch.equal(source, target))


def main() -> None:
    """Asks step by step."""
    import mpi4py  # noqa: PLC0415 - that this works is the first question

    say(mpi4py=mpi4py.__version__, loaded=libraries())
    mpi4py.rc.initialize = False
    from mpi4py import MPI  # noqa: PLC0415 - and this the second

    say(library=MPI.Get_library_version().strip("\x00 \n"), loaded=libraries())
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    names = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    say(
        thread=names.get(MPI.Query_thread(), "multiple"),
        size=MPI.COMM_WORLD.Get_size(),
        tag_ub=MPI.COMM_WORLD.Get_attr(MPI.TAG_UB),
        loaded=libraries(),
    )
    say(ulfm=has_ulfm(MPI.COMM_SELF))
    say(cuda=cuda_support(libraries()))
    if "gpu" in sys.argv:
        say(gpu_message=gpu_message(MPI))
    MPI.Finalize()
    say(ended=True)


if __name__ == "__main__":
    main()
