"""Looks after a running server: takes checkpoints when they are due, and one when the job is asked to end."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stalempi import preempt
from stalempi.errors import ConfigError, StalempiError
from stalempi.server import Server
from stalempi.train.checkpoint import CheckpointStore
from stalempi.train.every import Every
from stalempi.train.restart import Restart, describe

__all__ = ["Checkpoint", "Keeper"]

logger = logging.getLogger("stalempi.checkpoint")


@dataclass(frozen=True)
class Checkpoint:
    """Where and when a run is saved, and whether it goes on from what is there.

    Args:
        folder: holds the checkpoints of this run and of no other.
        every: 5000 (global samples) or "30s"; None: only at the end and when the job is asked to end.
        keep: how many are kept.
        resume: "auto" goes on from the newest in `folder`, and starts fresh where there is none; "no" starts fresh; a
            path is a checkpoint, or a folder whose newest it is.
    """

    folder: str | Path
    every: int | str | None = None
    keep: int = 2
    resume: str | Path = "auto"

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep} checkpoints: keep at least 1")
        Every.parse(self.every, "a checkpoint")

    @property
    def samples(self) -> float:
        """Global samples between two checkpoints; infinite if they do not count."""
        return Every.parse(self.every, "a checkpoint").samples or math.inf

    @property
    def seconds(self) -> float:
        """Seconds between two checkpoints; infinite if they do not count."""
        return Every.parse(self.every, "a checkpoint").seconds or math.inf

    def find(self) -> Path | None:
        """Returns the checkpoint to go on from; None to start fresh. Raises ConfigError if there is none that can."""
        if str(self.resume) == "no":
            return None
        if str(self.resume) != "auto":
            return CheckpointStore.find(Path(self.resume))
        folder = Path(self.folder)
        newest = CheckpointStore(folder, keep=self.keep).newest()
        return CheckpointStore.find(newest) if newest else None


class Keeper:
    """Takes checkpoints of a server and ends it when a signal asks for that; fits `Server.attendant`.

    A checkpoint is one copy of the state in memory, which a thread then writes while the server goes on. It is taken
    when no gradient waits, which under BSP is between two rounds.

    Args:
        server: not yet serving.
        options: where and when; None: no checkpoints.
        restart: what the run goes on from; None: it starts fresh.

    Attributes:
        resumed_from: the checkpoint that the run went on from.
        stopped: why it has ended the server; None: it has not.
        newest: the latest checkpoint that is on the disk.
    """

    def __init__(self, server: Server, options: Checkpoint | None, restart: Restart | None) -> None:
        self._server, self._options, self._restart = server, options, restart
        self._store = CheckpointStore(Path(options.folder), keep=options.keep) if options else None
        self._staging = _Staging()
        self._thread: threading.Thread | None = None
        self._failed: OSError | None = None
        self._last = -1, -math.inf  # samples and moment (s) of the latest
        self.stopped: str | None = None
        self.newest = self.resumed_from = restart.path if restart else None
        if restart:
            server.stats = restart.stats(len(server.slots), server.options.now())

    def started(self, now: float) -> None:
        """Brings policy and counts to where the run goes on from."""
        if self._restart:
            self._restart.bring(self._server, now)
        self._last = self._server.stats.samples, now

    def between(self, now: float) -> None:
        """Takes a checkpoint if it is time, and ends the server if a signal asks for it."""
        asked = preempt.requested() or ("a signal to another rank" if self._server.preempt_asked else None)
        if not (asked or self._is_due(now)) or not self._server.at_rest:
            return
        if asked:
            self._stop(asked)
        elif self._all_known() and not (self._thread and self._thread.is_alive()):
            self.save()

    def ended(self) -> None:
        """Takes the last checkpoint, so that a run that goes on from it has nothing left to do."""
        if self._store and self._all_known():
            self._save_whole()

    def save(self) -> None:
        """Copies the state, once, and has it written."""
        assert self._store is not None
        self.wait()
        now = self._server.options.now()
        self._last = self._server.stats.samples, now
        self._server.combine_buffers()
        parts = self._staging.copy(describe(self._server, now))
        self._thread = threading.Thread(target=self._write, args=(self._store, parts), name="stalempi-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until what was being written is on the disk."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def _is_due(self, now: float) -> bool:
        if self._options is None:
            return False
        samples, moment = self._last
        more = self._server.stats.samples - samples
        return more >= self._options.samples or (more > 0 and now - moment >= self._options.seconds)

    def _all_known(self) -> bool:
        """Whether the server knows where each worker is: after a change of their number it does once they push."""
        return self._restart is None or all(any(slot.note) for slot in self._server.slots)

    def _stop(self, why: str) -> None:
        if self._store and self._all_known():
            self._save_whole()
        self.stopped = why
        self._server.drain()

    def _save_whole(self) -> None:
        self.save()
        self.wait()
        if self._failed:
            raise StalempiError(
                f"the last checkpoint could not be written ({self._failed}): the newest is {self.newest}"
            )

    def _write(self, store: CheckpointStore, parts: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        try:
            name = store.next_name()
            store.begin(name)
            for part, value in parts.items():
                store.write_part(name, part, value)
            self.newest, self._failed = store.commit(name), None
        except OSError as error:
            self._failed = error
            logger.error("a checkpoint could not be written (%s): training goes on without it", error)
        else:
            logger.info("checkpoint %s written in %.2f s", self.newest, time.perf_counter() - began)

    def say_why(self) -> None:
        """Says on stderr why the job ends, and what is saved."""
        saved = f"checkpoint {self.newest}" if self._store else "no checkpoint, since no folder for them was given"
        preempt.say_why(self.stopped, self._server.stats.samples, saved)


class _Staging:
    """Memory that state is copied to; used again, since memory that is new costs more than the copy."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, value: Any, place: str = "") -> Any:
        """Returns a copy of `value`, its tensors on the CPU; it holds until the next call."""
        if isinstance(value, Tensor):
            kept = self._kept.get(place)
            if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                kept = self._kept[place] = torch.empty_like(value, device="cpu", requires_grad=False)
            return kept.copy_(value)
        if isinstance(value, Mapping):
            return {key: self.copy(inner, f"{place}/{key}") for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.copy(inner, f"{place}/{number}") for number, inner in enumerate(value)]
        return value
