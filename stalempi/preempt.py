"""Takes the signals by which a batch system asks a job to stop, and sees that it does within a given time."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from stalempi.errors import ConfigError

__all__ = ["PREEMPTED", "Preempted", "check_grace", "install", "requested", "say_why"]

# EX_TEMPFAIL of sysexits.h, "try again later": what a batch script requeues on.
PREEMPTED = 75

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_signal: str | None = None  # the first one received
_grace = 60.0
_end: Callable[[int], object] = os._exit


class Preempted(SystemExit):
    """Ends the program with code 75: the job was asked to stop, and whatever it could save is saved.

    Raised by `DistributedOptimizer.step` and `serve`; let it pass. `except Exception` does.
    """

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


def install(grace: float, end: Callable[[int], object]) -> None:
    """Takes SIGTERM and SIGUSR1 from now on, where the program has no handler of its own.

    Args:
        grace: seconds from the signal on after which the job is ended hard.
        end: ends the whole job with an exit code.
    """
    global _grace, _end
    _grace, _end = grace, end
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set handlers: the program's own affair then
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _take)


def check_grace(grace: float) -> float:
    """Returns `grace` (s); ConfigError unless it is above 0."""
    if not 0 < grace <= threading.TIMEOUT_MAX:
        raise ConfigError(f"grace must be a number of seconds above 0, got {grace}")
    return grace


def requested() -> str | None:
    """Returns the name of the signal that asked this rank to stop; None if none has."""
    return _signal


def say_why(why: str | None, samples: int, saved: str) -> None:
    """Says on stderr that the job ends, and what is saved; `why`: this rank's signal or else another's, by default."""
    why = why or requested() or "a signal to another rank"
    sys.stderr.write(f"stalempi: stopped by {why} after {samples} samples: {saved}; exit code {PREEMPTED}\n")
    sys.stderr.flush()


def _take(number: int, frame: FrameType | None) -> None:
    """Notes the signal. Nothing is said yet: a launcher also sends it to the ranks of a job that has failed."""
    global _signal  # noqa: PLW0603
    del frame
    if _signal is None:
        _signal = signal.Signals(number).name
        timer = threading.Timer(_grace, _too_late)
        timer.daemon = True
        timer.start()


def _too_late() -> None:
    sys.stderr.write(f"stalempi: {_signal} was not obeyed within {_grace:g} s: ended with code {PREEMPTED}\n")
    sys.stderr.flush()
    _end(PREEMPTED)
    os._exit(PREEMPTED)
