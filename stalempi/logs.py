"""Holds the one logger, and says on each of its lines which rank wrote it."""

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


def log_to_stderr(context: Context, level: str | None = None) -> None:
    """Lets this rank log from `level` on, each line with its role and rank; rank 0 more than warnings by default."""
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Stderr)]:
        logger.removeHandler(handler)
    handler = _Stderr()
    handler.setFormatter(logging.Formatter(f"[{context.role}, rank {context.rank}] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel((level or ("warning" if context.rank else "info")).upper())
