"""Judges this machine without MPI: packages, cores, memory, places to write, name."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import shutil
import socket
import tempfile
from pathlib import Path

import torch

from stalempi.bench.diagnose.finding import Finding, fail, ok, warn
from stalempi.version import __version__

__all__ = ["judge_machine"]

_MIB = 1 << 20
_FULL = 64 * _MIB  # a place with less room than this is as good as full
_TIGHT = 512 * _MIB


def judge_machine(*, out: Path, ranks: int | None) -> list[Finding]:
    """Looks at what every rank on this node will meet; `ranks` is how many will be here, if that is known."""
    return [
        ok("stalempi", f"{__version__} on Python {platform.python_version()}"),
        _torch(),
        _cores(),
        *_threads(ranks),
        *_start_method(),
        _memory(),
        _shared_memory(),
        _place("temporary files", Path(tempfile.gettempdir()), _unwritable_tmpdir()),
        _place("results", _nearest(out), None),
        _host_name(),
    ]


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return ok("torch", f"{torch.__version__}, {build}, numpy bridge {'there' if _numpy_works() else 'missing'}")


def _numpy_works() -> bool:
    try:
        torch.zeros(1).numpy()
    except RuntimeError:
        return False
    return True


def _cores() -> Finding:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if usable == 1 < there:
        return warn(
            "cores",
            f"this process is bound to one core of {there}: every rank that it starts is, too",
            "start from a shell without taskset, ask the batch system for more cores, or mpirun --bind-to none",
        )
    return ok("cores", f"{usable} of {there} to be used")


def _threads(ranks: int | None) -> list[Finding]:
    given = os.environ.get("OMP_NUM_THREADS", "")
    usable = len(os.sched_getaffinity(0))
    if ranks is None or not given.isdigit() or int(given) * ranks <= usable:
        return []
    return [
        warn(
            "threads",
            f"OMP_NUM_THREADS={given} for each of {ranks} ranks, but {usable} cores: they take turns",
            "unset OMP_NUM_THREADS (then every rank takes its share of the cores), or make it smaller",
        )
    ]


def _start_method() -> list[Finding]:
    method = multiprocessing.get_start_method(allow_none=True)
    if method != "fork":
        return []
    return [
        warn(
            "start method",
            "multiprocessing is set to fork: a child shares the locks and the network card's memory of MPI",
            "take set_start_method out, also of sitecustomize, and use stalempi.DataLoader, which never forks",
        )
    ]


def _memory() -> Finding:
    free = _available()
    if free is None:
        return ok("memory", "unknown")
    text = f"{free / 1e9:.1f} GB free"
    if free < _TIGHT:
        return warn("memory", text, "a rank takes about 0.4 GB before it has a model: end other programs")
    return ok("memory", text)


def _available() -> int | None:
    """Returns the bytes that may still be taken, under a control group's limit too."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    free = int(found[1]) * 1024 if found else None
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        most = limit.read_text(encoding="utf-8").strip()
        if most.isdigit():
            left = int(most) - int(used.read_text(encoding="utf-8"))
            free = left if free is None else min(free, left)
    return free


def _shared_memory() -> Finding:
    name, place = "shared memory", Path("/dev/shm")
    problem = _write(place)
    if problem:
        return fail(name, f"{place} cannot be written ({problem})", "mount a tmpfs there (docker: --ipc=host)")
    free = shutil.disk_usage(place).free
    if free < _FULL:
        return fail(
            name,
            f"{place} has {free / _MIB:.1f} MiB free: ranks of one node share their buffers there",
            "clear it of files left by lost jobs, or make it larger (docker: --shm-size=1g)",
        )
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text(encoding="utf-8").strip() not in ("0", "1"):
        return warn(
            name,
            f"{place} has {free / 1e9:.1f} GB free, but ranks may not read each other's memory (yama)",
            "if MPI complains: Open MPI --mca smsc ^cma, UCX_POSIX_USE_PROC_LINK=n",
        )
    return ok(name, f"{place} has {free / 1e9:.1f} GB free")


def _unwritable_tmpdir() -> str | None:
    """Returns what is wrong with TMPDIR: Python goes elsewhere in silence, MPI libraries do not."""
    given = os.environ.get("TMPDIR")
    problem = _write(Path(given)) if given else None
    return f"TMPDIR={given} cannot be written ({problem}), and Open MPI keeps its session there" if problem else None


def _place(name: str, place: Path, problem: str | None) -> Finding:
    if problem is None and (found := _write(place)):
        problem = f"{place} cannot be written ({found})"
    if problem:
        return fail(name, problem, "give another folder, or clear this one")
    free = shutil.disk_usage(place).free
    if free < _FULL:
        return fail(name, f"{place} is full: {free / _MIB:.1f} MiB free", "give another folder, or clear this one")
    if free < _TIGHT:
        return warn(name, f"{place} has only {free / _MIB:.0f} MiB free", "give another folder, or clear this one")
    return ok(name, f"{place} has {free / 1e9:.1f} GB free")


def _nearest(folder: Path) -> Path:
    """Returns the folder, or else the one above in which it would be made."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _write(folder: Path) -> str | None:
    """Writes a little into a folder, and returns why that fails."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return warn(
            "host name",
            f"{name} does not resolve ({error.strerror or error}): ranks of MPICH and of gloo look for it",
            f"add a line with {name} to /etc/hosts, or set the host name right",
        )
    return ok("host name", f"{name} is {address}")
