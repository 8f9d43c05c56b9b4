"""Writes down what a checkpoint keeps of a worker itself: how far its data has come, and its random numbers."""

from __future__ import annotations

import array
import json
import random
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from stalempi.errors import ConfigError

__all__ = ["NOTE_BYTES", "Notebook", "Positioned"]

# Lengths (bytes) of: position and small numbers as JSON; generators of torch, of the GPU, of numpy and of Python.
_LENGTHS = struct.Struct("<5I")

# Of which random numbers take 10 thousand. A sampler's position grows with every `reshard` in the middle of an epoch.
NOTE_BYTES = 16384


class Positioned(Protocol):
    """Data that knows how far it has come: a DistributedSampler, or a DataLoader with one."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as plain values."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Goes on from the positions of all workers of an earlier run."""


class Notebook:
    """A worker's own state as bytes of a fixed number, so that it travels in the header of every push.

    A push carries it because then the server knows, at any moment, the state of each worker at the very push that it
    has applied last, and need not ask and wait.

    Args:
        device: whose generator is kept besides the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._data: Positioned | None = None
        self._earlier: list[dict[str, Any] | None] = []
        self._own: bytes | None = None

    def track(self, data: Positioned) -> None:
        """Notes the position of `data` from now on; after `load`, puts it where the earlier run had come to.

        Random numbers go on from there too, whatever has been drawn or seeded since.
        """
        self._data = data
        self._restore_random()
        if any(self._earlier):
            start = data.state_dict() | {"num_workers": len(self._earlier)}  # of a worker that had not pushed yet
            data.load_state_dicts([start if state is None else state for state in self._earlier])

    def write(self) -> bytes:
        """Returns the present state, NOTE_BYTES bytes."""
        note = self._pack()
        if len(note) > NOTE_BYTES:
            raise ConfigError(f"the state of this worker takes {len(note)} bytes, more than {NOTE_BYTES}: reshard less")
        return note.ljust(NOTE_BYTES, b"\0")

    def load(self, notes: Sequence[bytes], own: bytes | None) -> None:
        """Goes on from the `notes` of all workers of an earlier run; random numbers only from one's `own`.

        A note of zeros is of a worker that had not pushed yet: it starts where the program starts.
        """
        self._earlier = [json.loads(_unpack(note)[0])["data"] if any(note) else None for note in notes]
        self._own = own
        self._restore_random()

    def _restore_random(self) -> None:
        own = self._own
        if own is None or not any(own):
            return
        words, cpu, gpu, numpy, python = _unpack(own)
        small = json.loads(words)
        torch.set_rng_state(_tensor(cpu))
        if gpu and self._device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(gpu), self._device)
        keys = np.frombuffer(numpy, dtype=np.uint32)
        np.random.set_state(("MT19937", keys, *small["numpy"]))
        version, gauss = small["python"]
        random.setstate((version, tuple(array.array("I", python)), gauss))

    def _pack(self) -> bytes:
        _, keys, *numbers = np.random.get_state()
        version, words, gauss = random.getstate()
        small = {
            "data": self._data.state_dict() if self._data else None,
            "numpy": numbers,
            "python": [version, gauss],
        }
        gpu = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.empty(0)
        parts = [
            json.dumps(small).encode(),
            torch.get_rng_state().numpy().tobytes(),
            gpu.numpy().tobytes(),
            np.asarray(keys).tobytes(),
            array.array("I", words).tobytes(),
        ]
        return _LENGTHS.pack(*map(len, parts)) + b"".join(parts)


def _unpack(note: bytes) -> list[bytes]:
    parts, start = [], _LENGTHS.size
    for length in _LENGTHS.unpack_from(note):
        parts.append(note[start : start + length])
        start += length
    return parts


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
