"""Judges the MPI library that mpi4py uses, and the launcher beside it."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from stalempi.bench.diagnose.finding import Finding, fail, ok, warn
from stalempi.bench.diagnose.probe import Answer, ask, unlaunched
from stalempi.bench.launchers import Vendor, find_launcher, find_vendor
from stalempi.errors import ConfigError
from stalempi.transport.message import Tag

__all__ = ["ask_library", "judge_launcher", "judge_library", "judge_shared_settings", "vendor_of"]

_SCRIPT = Path(__file__).with_name("ask_mpi.py")
_LIMIT = 60.0
_INSTALL = "load your site's MPI module, or pip install 'stalempi[mpi]'"


def ask_library(*, gpu: bool) -> Answer:
    """Starts MPI alone in a process and returns what it said."""
    return ask([_SCRIPT, *(["gpu"] if gpu else [])], timeout=_LIMIT, env=unlaunched())


def vendor_of(library: str) -> Vendor:
    """Returns the family of launchers that belongs to a library, by what it says of itself."""
    number = re.search(r"(\d+)\.\d+", library)
    major = int(number[1]) if number else 0
    if "Open MPI" in library:
        return Vendor("openmpi", major)
    return Vendor("intel" if "Intel" in library else "mpich", major)


def judge_library(answer: Answer, *, gpu: bool) -> list[Finding]:
    """Says what the library is and can do; `gpu`: whether there are GPUs whose memory it should reach."""
    facts = answer.facts
    if "mpi4py" not in facts:
        return [fail("mpi4py", f"cannot be imported: {answer.last_words}", "pip install mpi4py")]
    found = [ok("mpi4py", facts["mpi4py"])]
    if "library" not in facts:
        named = f" (MPI4PY_LIBMPI={os.environ['MPI4PY_LIBMPI']})" if "MPI4PY_LIBMPI" in os.environ else ""
        found.append(fail("MPI library", f"mpi4py cannot load one{named}: {answer.last_words}", _INSTALL))
        return [*found, *(f for f in [_one_library(facts["loaded"])] if f.level)]
    loaded = facts["loaded"]
    title = " ".join(facts["library"].split("\n")[0].split(",")[0].split())
    found += [ok("MPI library", f"{title} ({', '.join(loaded) or 'inside mpi4py'})"), _one_library(loaded)]
    if "thread" not in facts:
        how = f"does not return within {_LIMIT:.0f} s" if answer.code is None else f"fails: {answer.last_words}"
        return [
            *found,
            fail("MPI_Init", how, "run python -c 'from mpi4py import MPI' here, and set right what it says"),
        ]
    if facts["thread"] in ("serialized", "multiple"):
        found.append(ok("thread level", facts["thread"]))
    else:
        found.append(
            fail("thread level", f"{facts['thread']}, not serialized", "use an MPI that is built with threads")
        )
    found.append(_tags(facts["tag_ub"]))
    found.append(
        ok("ULFM", "there (mpirun --with-ft ulfm)" if facts.get("ulfm") else "not there: a lost rank ends its job")
    )
    return [*found, _cuda(answer, gpu=gpu), *_transports(facts["library"])]


def _one_library(loaded: list[str]) -> Finding:
    name = "one MPI"
    folders = {str(Path(path).resolve().parent) for path in loaded}
    if len(folders) < 2:
        return ok(name, "a process loads one MPI library")
    preloaded = " LD_PRELOAD names MPI libraries." if "mpi" in os.environ.get("LD_PRELOAD", "") else ""
    return fail(
        name,
        f"two MPI libraries in one process: {', '.join(loaded)}.{preloaded}",
        "unset LD_PRELOAD and MPI4PY_LIBMPI, load one MPI module only, and build mpi4py and torch against it",
    )


def _tags(most: int) -> Finding:
    if most >= max(Tag):
        return ok("MPI_TAG_UB", str(most))
    return fail(
        "MPI_TAG_UB", f"{most} is below {max(Tag)}, which we need", "use another MPI or another transport of it"
    )


def _cuda(answer: Answer, *, gpu: bool) -> Finding:
    name, facts = "CUDA-aware", answer.facts
    asked = facts.get("cuda")
    says = "unknown" if asked is None else ("yes" if asked else "no")
    if not gpu:
        return ok(name, f"the library says {says}; no GPU here that would need it")
    tried = facts.get("gpu_message")
    if tried:
        return ok(name, f"the library says {says}; a message from GPU to GPU memory arrived")
    how = "came out wrong" if tried is False else f"ended with: {answer.last_words}"
    return warn(
        name,
        f"the library says {says}; a message between GPU buffers {how}",
        "messages go through host memory; for an MPI that reaches GPU memory, load one built with CUDA "
        "(UCX_TLS with cuda_copy,cuda_ipc; MPICH_GPU_SUPPORT_ENABLED=1; I_MPI_OFFLOAD=1)",
    )


def _transports(library: str) -> list[Finding]:
    """Says by what messages may travel, as far as the library tells, and whether a fast network lies idle."""
    folder = Path("/sys/class/infiniband")
    infiniband = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    interfaces = [name for _, name in socket.if_nameindex() if name != "lo"]
    if "Open MPI" in library:
        parts = _components()
        text = "; ".join(f"{kind}: {', '.join(parts[kind])}" for kind in ("pml", "mtl", "btl") if parts.get(kind))
        fast = "ucx" in parts.get("pml", []) or "ofi" in parts.get("mtl", [])
    else:
        device = re.search(r"Device:\s*(.+)", library)
        text = device[1] if device else "the library does not tell"
        fast = not device or "ucx" in text or "ofi" in text
    said = f"{text or 'unknown'}; interfaces: {', '.join([*infiniband, *interfaces]) or 'none but lo'}"
    if infiniband and text and not fast:
        return [
            warn("transports", said, "InfiniBand is there and this MPI cannot use it: load one built with UCX or OFI")
        ]
    return [ok("transports", said)]


def _components() -> dict[str, list[str]]:
    """Returns Open MPI's components of each kind, from the ompi_info beside its launcher or on PATH."""
    try:
        beside = find_launcher().with_name("ompi_info")
    except ConfigError:
        beside = Path("ompi_info")
    answer = ask([beside if beside.exists() else "ompi_info", "--parsable", "--all"], timeout=20)
    found: dict[str, list[str]] = {}
    for kind, name in re.findall(r"^mca:(btl|pml|mtl|smsc):(\w+):version", answer.out, re.MULTILINE):
        if name not in found.setdefault(kind, []):
            found[kind].append(name)
    return found


def judge_shared_settings(environment: Mapping[str, str]) -> list[Finding]:
    """Finds settings that keep ranks of one node from sharing memory."""
    found: list[Finding] = []
    for name, value in environment.items():
        parts = {part.strip() for part in value.split(",")}
        forbidden = value.startswith("^") and parts & {"^sm", "sm", "^vader", "vader"}
        if name.endswith("MCA_btl") and (forbidden or not (value.startswith("^") or parts & {"sm", "vader"})):
            found.append(_no_sharing(name, value, f"add sm to it, or unset {name}"))
        if name == "UCX_TLS" and not parts & {"all", "sm", "shm", "posix", "sysv"} and not value.startswith("^"):
            found.append(_no_sharing(name, value, "add sm to it, or unset UCX_TLS"))
        if name in ("MPIR_CVAR_NOLOCAL", "MPIR_CVAR_CH3_NOLOCAL") and value not in ("", "0"):
            found.append(_no_sharing(name, value, f"unset {name}"))
        if name == "I_MPI_FABRICS" and "shm" not in value:
            found.append(_no_sharing(name, value, "use shm:ofi"))
    return found


def _no_sharing(name: str, value: str, cure: str) -> Finding:
    return warn("shared memory", f"{name}={value}: ranks of one node have no shared memory, they use the network", cure)


def judge_launcher(answer: Answer, given: Path | None) -> list[Finding]:
    """Says which launcher there is and whether it belongs to the library."""
    try:
        launcher = find_launcher(given)
        vendor = find_vendor(launcher)
    except ConfigError as error:
        return [fail("launcher", str(error), "without one, start ranks by srun --mpi=pmix")]
    found: list[Finding] = []
    library = answer.facts.get("library")
    theirs = vendor_of(library) if library else vendor
    kin = {"mpich", "intel"}  # they share an ABI and a way to start ranks
    same = vendor.name == theirs.name or {vendor.name, theirs.name} <= kin
    if not same or (vendor.name == "openmpi" and 0 < vendor.major != theirs.major > 0):
        found.append(
            fail(
                "launcher",
                f"{launcher} is of {vendor.title}, mpi4py uses {theirs.title}: it would start n ranks that each "
                "believe to be alone (size 1)",
                f"use the mpirun of {theirs.title} (--launcher or STALEMPI_MPIEXEC), or let MPI4PY_LIBMPI name the "
                f"libmpi of {vendor.title}",
            )
        )
    else:
        found.append(ok("launcher", f"{launcher} ({vendor.title})"))
    shell = shutil.which("ssh")
    found.append(ok("remote shell", shell or "no ssh: other nodes only inside an allocation"))
    return found
