"""Finds out whether MPI says that it takes the memory of a GPU, itself or by its environment; sends nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stalempi.errors import ConfigError

__all__ = ["OVERRIDE", "Answer", "ask", "query_library"]

OVERRIDE = "STALEMPI_CUDA_AWARE"

# Libraries whose GPU support has to be switched on: a word of their version, and the variables that do it.
_SWITCHES = {
    "CRAY MPICH": ("MPICH_GPU_SUPPORT_ENABLED",),
    "MVAPICH": ("MV2_USE_CUDA", "MVP_USE_CUDA"),
    "Intel(R) MPI": ("I_MPI_OFFLOAD",),
}
_OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Answer:
    """Whether MPI takes GPU memory, and who says so."""

    aware: bool
    reason: str


def ask(environment: Mapping[str, str], library: str, query: Callable[[], bool | None]) -> Answer:
    """Returns what can be known without sending a message.

    Args:
        environment: of this process.
        library: how MPI names itself.
        query: asks the library; None if it does not say.

    Raises ConfigError if STALEMPI_CUDA_AWARE is neither 0 nor 1.
    """
    override = environment.get(OVERRIDE)
    if override is not None:
        if override not in ("0", "1"):
            raise ConfigError(f"{OVERRIDE} must be 0 or 1, got {override!r}")
        return Answer(override == "1", f"{OVERRIDE}={override}")
    if off := _switched_off(environment):
        return Answer(False, off)
    for word, switches in _SWITCHES.items():
        if word.lower() in library.lower():
            on = [f"{name}={environment[name]}" for name in switches if environment.get(name, "").lower() not in _OFF]
            return Answer(bool(on), on[0] if on else f"{switches[0]} is not set")
    said = query()
    if said is None:
        return Answer(False, "the MPI library has no MPIX_Query_cuda_support")
    return Answer(said, f"MPIX_Query_cuda_support says {'yes' if said else 'no'}")


def _switched_off(environment: Mapping[str, str]) -> str:
    """Returns the setting that keeps GPU memory out; "" if there is none."""
    for name in ("MPIR_CVAR_ENABLE_GPU", "OMPI_MCA_opal_cuda_support"):
        if environment.get(name, "1").lower() in _OFF:
            return f"{name}={environment[name]}"
    transports = environment.get("UCX_TLS", "all").lower()
    negated = transports.startswith("^")
    if ("cuda" in transports) == negated and (negated or "all" not in transports.split(",")):
        return f"UCX_TLS={environment['UCX_TLS']}"
    return ""


def query_library() -> bool | None:
    """Returns what MPIX_Query_cuda_support of the MPI library in this process says; None if it has none."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "/libmpi" in line)
    for name in (None, *paths):
        try:
            function = ctypes.CDLL(name).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [], ctypes.c_int
        return bool(function())
    return None
