"""Moves activations and error gradients between neighbouring blocks by nonblocking MPI.

A message is a header, which says for which batch it is and what its tensors look like, and the bytes of each tensor
under a tag of their own. The first message of a link settles how large its tensors may be: from then on as many
receives are posted first as the schedule can have messages on their way.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from stalempi.errors import ConfigError, ProtocolError, StallError
from stalempi.flat import MAX_BUCKET_BYTES
from stalempi.pipeline.link import MAX_TENSORS, Key, Lane, Note, Receiver, Sender, check_key
from stalempi.transport.backoff import wait_for
from stalempi.transport.message import Tag

__all__ = ["MpiReceiver", "MpiSender", "Progress"]

_MAGIC = 0x7374616C656D7069
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MAX_DIMS = 6
_FIXED = 5  # magic, batch, micro-batch, note, tensors
_HEADER = _FIXED + MAX_TENSORS * (2 + _MAX_DIMS)
_FIRST_TAG = Tag.NOBODY + 1  # above those of the data-parallel messages

Header = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Progress:
    """Lets MPI move messages while this rank computes: it moves large ones only when it is called.

    MPI is not asked to be thread-safe: whoever calls it holds `lock`.

    Args:
        comm: any communicator of the job.
        every: seconds between two calls.
    """

    def __init__(self, comm: MPI.Intracomm, every: float = 5e-4) -> None:
        self.lock = threading.RLock()
        self._comm, self._every = comm, every
        self._wanted = threading.Event()
        threading.Thread(target=self._run, name="stalempi-progress", daemon=True).start()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Calls MPI now and then until the end of the block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Calls MPI now and then from here on."""
        self._wanted.set()

    def stop(self) -> None:
        """Returns when no call is under way any more."""
        self._wanted.clear()
        with self.lock:
            pass

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            with self.lock:
                if self._wanted.is_set():
                    self._comm.Iprobe(MPI.ANY_SOURCE, Tag.NOBODY)
            time.sleep(self._every)


def _tags(lane: Lane) -> tuple[int, int]:
    return _FIRST_TAG + 2 * lane, _FIRST_TAG + 2 * lane + 1


def _pieces(tensor: Tensor, room: int) -> list[Bytes]:
    """Returns a contiguous tensor's memory as messages: as many as `room` bytes would take, the last ones empty."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()  # MPI takes an array sooner than a tensor
    return [flat[at : at + MAX_BUCKET_BYTES] for at in range(0, max(room, 1), MAX_BUCKET_BYTES)]


def _describe(key: Key, tensors: Sequence[Tensor], note: Note) -> Header:
    header = np.zeros(_HEADER, dtype=np.int64)
    header[:_FIXED] = _MAGIC, *key, note, len(tensors)
    for place, tensor in enumerate(tensors):
        at = _FIXED + place * (2 + _MAX_DIMS)
        header[at : at + 2 + tensor.dim()] = _DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape
    return header


class MpiSender(Sender):
    """Hands messages to one rank.

    Args:
        comm: a communicator of the job.
        rank: who receives.
        lane: which queue between the two.
        depth: messages that may be on their way.
        progress: whose lock is held during calls.
        timeout: seconds that a full queue may stay full.

    Unless the lane takes any size, the first message settles how large the later ones may be.
    """

    def __init__(
        self, comm: MPI.Intracomm, rank: int, lane: Lane, depth: int, *, progress: Progress, timeout: float
    ) -> None:
        self._comm, self._rank, self._tags = comm, rank, _tags(lane)
        self._depth, self._progress, self._timeout, self._fixed = depth, progress, timeout, not lane.any_size
        self._on_way: deque[tuple[list[MPI.Request], list[object]]] = deque()
        self._limits: list[tuple[torch.dtype, int]] | None = None

    def send(self, key: Key, tensors: Sequence[Tensor], *, note: Note = Note.NONE) -> None:
        self._check(key, tensors)
        self._wait(self._depth - 1)
        header = _describe(key, tensors, note)
        pieces = self._cut([_to_host(tensor) for tensor in tensors])
        with self._progress.lock:
            requests = [self._comm.Isend(header, self._rank, self._tags[0])]
            requests += [self._comm.Isend(piece, self._rank, self._tags[1]) for piece in pieces]
        self._on_way.append((requests, [header, *pieces]))

    def flush(self) -> None:
        self._wait(0)

    def _cut(self, tensors: Sequence[Tensor]) -> list[Bytes]:
        """Cuts tensors into the messages that the receives which are posted expect."""
        rooms = [t.nbytes for t in tensors] if self._limits is None else [room for _, room in self._limits]
        return [piece for tensor, room in zip(tensors, rooms, strict=True) for piece in _pieces(tensor, room)]

    def _wait(self, most: int) -> None:
        def few() -> bool:
            with self._progress.lock:
                while self._on_way and MPI.Request.Testall(self._on_way[0][0]):
                    self._on_way.popleft()
            return len(self._on_way) <= most

        if not wait_for(few, self._timeout):
            raise StallError(f"rank {self._rank} took nothing for {self._timeout:g} s: it is stuck or elsewhere")

    def _check(self, key: Key, tensors: Sequence[Tensor]) -> None:
        if len(tensors) > MAX_TENSORS or any(t.dim() > _MAX_DIMS or t.dtype not in _DTYPES for t in tensors):
            raise ConfigError(
                f"between blocks go at most {MAX_TENSORS} tensors of at most {_MAX_DIMS} dimensions and a common "
                f"dtype, got {', '.join(f'{tuple(t.shape)} {t.dtype}' for t in tensors)}: cut elsewhere"
            )
        if not self._fixed:
            return
        sizes = [(tensor.dtype, tensor.nbytes) for tensor in tensors]
        self._limits = self._limits or sizes
        fits = len(sizes) == len(self._limits) and all(
            dtype == agreed and nbytes <= limit
            for (dtype, nbytes), (agreed, limit) in zip(sizes, self._limits, strict=True)
        )
        if not fits:
            route = f"batch {key[0]} from rank {self._comm.Get_rank()} to rank {self._rank}"
            raise ConfigError(
                f"{route}: its tensors changed from {_list(self._limits)} to {_list(sizes)}: a later batch may be "
                "smaller than the first, not larger, and of the same kind"
            )


def _list(sizes: Sequence[tuple[torch.dtype, int]]) -> str:
    return " + ".join(f"{nbytes} bytes of {str(dtype).removeprefix('torch.')}" for dtype, nbytes in sizes)


def _to_host(tensor: Tensor) -> Tensor:
    """Returns contiguous host memory that holds the values: the tensor's own, or pinned memory with a copy."""
    if not tensor.is_cuda:
        return tensor.contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return host


@dataclass
class _Slot:
    """The place of one message that has not arrived yet."""

    header: Header
    begun: MPI.Request
    here: bool = False
    buffers: list[Tensor] | None = None
    requests: list[MPI.Request] | None = None


class MpiReceiver(Receiver):
    """Takes messages from one rank; see `MpiSender`.

    Args:
        device: where what arrives is to be.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        comm: MPI.Intracomm,
        rank: int,
        lane: Lane,
        depth: int,
        *,
        progress: Progress,
        timeout: float,
        device: torch.device,
    ) -> None:
        self._comm, self._rank, self._tags = comm, rank, _tags(lane)
        self._depth, self._progress, self._timeout = depth, progress, timeout
        self._device, self._fixed = device, not lane.any_size
        self._sizes: list[int] | None = None
        self._slots: deque[_Slot] = deque()
        if self._fixed:
            with progress.lock:
                self._post()

    def ready(self) -> bool:
        with self._progress.lock:
            if not self._slots:
                self._post()
            return self._whole()

    def receive(self, key: Key) -> tuple[Tensor, ...]:
        if not wait_for(self.ready, self._timeout, lambda: bool(self._slots) and self._slots[0].here):
            raise StallError(
                f"nothing came from rank {self._rank} for {self._timeout:g} s, batch {key[0]}.{key[1]} is due: "
                "it is stuck or elsewhere"
            )
        slot = self._slots.popleft()
        tensors = self._unpack(slot)
        if self._fixed and self._sizes is None:
            assert slot.buffers is not None, "it is whole"
            self._sizes = [buffer.numel() for buffer in slot.buffers]
        if self._fixed:
            with self._progress.lock:
                self._post()
        got, self.note = (int(slot.header[1]), int(slot.header[2])), Note(int(slot.header[3]))
        check_key(got, key, f"rank {self._rank}")
        return tensors

    def close(self) -> None:
        with self._progress.lock:
            for slot in self._slots:
                for request in (slot.begun, *(slot.requests or ())):
                    if request != MPI.REQUEST_NULL:  # as it is once its message has come
                        request.Cancel()
                        request.Wait()
        self._slots.clear()

    def _post(self) -> None:
        """Posts the receives of as many messages as can be on their way, or of one while their size is not known."""
        wanted = self._depth if self._sizes is not None else 1
        while len(self._slots) < wanted:
            header = np.zeros(_HEADER, dtype=np.int64)
            slot = _Slot(header, self._comm.Irecv(header, self._rank, self._tags[0]))
            if self._sizes is not None:
                self._post_parts(slot, self._sizes)
            self._slots.append(slot)

    def _post_parts(self, slot: _Slot, sizes: Sequence[int]) -> None:
        pinned = self._device.type == "cuda"
        slot.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        slot.requests = [
            self._comm.Irecv(piece, self._rank, self._tags[1])
            for buffer in slot.buffers
            for piece in _pieces(buffer, buffer.numel())
        ]

    def _whole(self) -> bool:
        slot = self._slots[0]
        slot.here = slot.here or bool(slot.begun.Test())
        if not slot.here:
            return False
        if slot.header[0] != _MAGIC:
            raise ProtocolError(f"rank {self._rank} sent something else than a message of stalempi")
        if slot.requests is None:
            shapes = _shapes(slot.header)
            self._post_parts(slot, [_nbytes(shape, dtype) for shape, dtype in shapes])
        assert slot.requests is not None
        return bool(MPI.Request.Testall(slot.requests))

    def _unpack(self, slot: _Slot) -> tuple[Tensor, ...]:
        assert slot.buffers is not None, "it is whole"
        shapes = _shapes(slot.header)
        if len(shapes) != len(slot.buffers) or any(
            _nbytes(shape, dtype) > buffer.numel() for (shape, dtype), buffer in zip(shapes, slot.buffers, strict=True)
        ):
            raise ProtocolError(f"rank {self._rank} sent {shapes}, which does not fit what was agreed on")
        return tuple(
            buffer[: _nbytes(shape, dtype)].view(dtype).view(shape).to(self._device)
            for (shape, dtype), buffer in zip(shapes, slot.buffers, strict=True)
        )


def _shapes(header: Header) -> list[tuple[list[int], torch.dtype]]:
    found, words = [], header.tolist()
    for place in range(words[_FIXED - 1]):
        at = _FIXED + place * (2 + _MAX_DIMS)
        found.append((words[at + 2 : at + 2 + words[at + 1]], _DTYPES[words[at]]))
    return found


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
