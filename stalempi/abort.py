"""Turns the failure of one rank into the end of the job, with one message that says where and what."""

from __future__ import annotations

import atexit
import dis
import os
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import NoReturn

from mpi4py import MPI

from stalempi import context, preempt
from stalempi.errors import ConfigError, StalempiError

__all__ = ["end", "fail", "install"]

# A fault that several ranks find is told by the lowest of them: each waits this long (s) per rank below it, up to a
# limit, for one of those to end the job.
_GRACE, _LONGEST_GRACE = 0.5, 4.0

# A launcher that sees a rank abort no longer reads what the rank has written: give it the time to (s).
_DELIVERY = 0.3

_NOT_CALLED = object()

_installed = False
_program: FrameType  # where the main program runs
_status: object = _NOT_CALLED  # what `sys.exit` was last called with


def install() -> None:
    """Makes an uncaught exception, in any thread, and a non-zero `sys.exit` abort the job; does so once.

    Without this the other ranks of a plain `mpirun python script.py` wait for the failed one for ever. At a normal end
    of the program, what the user has left open is closed.
    """
    global _installed, _program  # noqa: PLW0603 - hooks are global by nature
    if _installed:
        return
    _installed = True
    _program = _outermost_frame()
    sys.excepthook = _on_exception
    threading.excepthook = _on_thread_exception
    sys.exit = _exit
    atexit.register(_at_end)


def fail(error: BaseException) -> NoReturn:
    """Says where and why this rank failed and ends the job: exit code 2 if the user's input is at fault, else 1."""
    asked = preempt.requested()
    time.sleep(min(_LONGEST_GRACE, _GRACE * MPI.COMM_WORLD.Get_rank()))
    if preempt.requested() == asked:  # else the launcher is ending us, since a lower rank has told of it
        _say(_story(error))
    end(2 if isinstance(error, ConfigError) else 130 if isinstance(error, KeyboardInterrupt) else 1)


def _story(error: BaseException) -> str:
    where = f"rank {MPI.COMM_WORLD.Get_rank()}"
    if context.is_initialized():
        where += f" ({context.current().role})"
    if context.open_jobs:
        where += f" step {context.open_jobs[-1].step_count}"
    if isinstance(error, ConfigError):
        return f"stalempi: error: {error}"
    if isinstance(error, StalempiError):
        return f"stalempi: {where} failed: {error}"
    if isinstance(error, KeyboardInterrupt):
        return f"stalempi: {where} was interrupted"
    lines = "".join(traceback.format_exception(error))
    return f"stalempi: {where} failed:\n{lines}"


def _say(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


def end(code: int) -> NoReturn:
    """Ends the whole job with an exit code."""
    sys.stdout.flush()
    time.sleep(_DELIVERY)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # Abort does not always return control, but never leave it to chance


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:  # the signature that sys.excepthook has
    del kind, trace
    fail(error)


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    error = args.exc_value or args.exc_type()
    if not isinstance(error, SystemExit):
        fail(error)
    if _is_failure(error.code):
        _abort_quietly(error.code)


def _exit(status: object = None, /) -> NoReturn:
    """Stands in for `sys.exit`: a status that says failure ends the job, unless somebody catches the exception."""
    global _status  # noqa: PLW0603
    _status = status
    raise SystemExit(status)


def _is_failure(status: object) -> bool:
    return status is not _NOT_CALLED and status not in (None, 0)


def _outermost_frame() -> FrameType:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back:
        frame = frame.f_back
    return frame


def _ran_to_its_end() -> bool:
    """Whether the main program returned; else a SystemExit, which no hook is told of, has cut it short."""
    return "RETURN" in dis.opname[_program.f_code.co_code[_program.f_lasti]]


def _abort_quietly(status: object) -> None:
    if isinstance(status, int):
        end(status)
    _say(str(status))
    end(1)


def _at_end() -> None:
    if not _ran_to_its_end():
        if _is_failure(_status):
            _abort_quietly(_status)
        if _status is _NOT_CALLED and context.open_jobs:
            fail(StalempiError("SystemExit left the program with its optimizer open: serve or close it first"))
    for job in reversed(list(context.open_jobs)):
        try:
            job.finish()
        except StalempiError as error:
            fail(error)
