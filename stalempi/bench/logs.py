"""Says where a line of the log comes from, and which lines there are."""

from __future__ import annotations

import logging
import sys

from stalempi.context import Context

__all__ = ["LEVELS", "log_to_stderr", "logger"]

LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("stalempi")


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Writes to what sys.stderr is now."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(context: Context, level: str | None) -> None:
    """Lets this rank log from `level` on, each line with its role and rank; by default a worker only warns."""
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Stderr)]:
        logger.removeHandler(handler)
    handler = _Stderr()
    handler.setFormatter(logging.Formatter(f"[{context.role}, rank {context.rank}] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel((level or ("info" if context.is_server else "warning")).upper())
