"""Holds what the server keeps for each worker: where its pushes arrive, and how they are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stalempi.flat import Bucket, Flat
from stalempi.replica import Replica
from stalempi.transport.base import Packet
from stalempi.transport.message import HEADER_BYTES, Header, Kind

__all__ = ["Mean", "Slot", "combine_buffers", "joined_rows", "weighted_sum"]


class Slot:
    """Where one worker's pushes arrive, and what the server knows of the worker.

    Attributes:
        gradients: views of what the latest push brought.
        rows: of each sparse gradient in it, by place, the form that knows its rows.
        hyper, touched: the hyper-parameters (float64) and flags in its header, see `Replica`.
        buffers, note: copies of what it brought, since a next push may arrive at any moment after the release.
        release_header: where the header of the worker's next release is written.
        push: the header of the push that waits to be applied.
        version: updates in the parameters that the worker has.
        step: the worker's clock at its latest push.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        gradients: Flat | None = None,
        buffers: Flat | None = None,
        packet: Packet | None = None,
        note_bytes: int = 0,
    ) -> None:
        """Makes room for the pushes of a worker, or takes the place where some are."""
        self.gradients: Flat = gradients or replica.params.like()
        self.buffers: Flat = buffers or replica.buffers.like()
        self._arriving = replica.buffers.like()
        self._wire = replica.wire(self.gradients)
        self.packet: Packet = packet or replica.push_packet(self._wire, self._arriving, note_bytes=note_bytes)
        self.rows = self._wire.rows
        self.hyper = replica.hyper(self.packet.header)
        self.touched = replica.touched(self.packet.header)
        self.note = bytearray(note_bytes)
        self._arriving_note = replica.note(self.packet)
        self.release_header = bytearray(HEADER_BYTES)
        self.push: Header | None = None
        self.version = self.step = 0

    def accept(self, header: Header) -> None:
        """Copies what else a message brought besides the gradients, and reads those in if they are compressed."""
        self.note[:] = self._arriving_note
        if not header.nbytes or header.kind is Kind.LEAVE:
            return
        self._wire.decode()
        for mine, arrived in zip(self.buffers.storages, self._arriving.storages, strict=True):
            mine.copy_(arrived)

    def take(self) -> Header:
        """Returns the header of the push that waits, which then no longer does."""
        push = self.push
        assert push is not None, "no gradient waits here"
        self.push = None
        return push


class Mean:
    """The weighted mean of the slots' gradients, to be made whole or bucket by bucket.

    It is summed in the first slot's receive buffer, which is the server's until that worker's release, in the order
    given, so that the same pushes give the same bits.

    Attributes:
        gradients: where it is made.
        touched: which parameters any of the slots has a gradient for.
        rows: the rows that the sparse gradients of any of the slots have, ascending, by the parameter's place.
    """

    def __init__(self, slots: Sequence[Slot], weights: Sequence[float]) -> None:
        self._slots, self._weights = slots, weights
        self.gradients = slots[0].gradients
        self.touched = slots[0].touched if len(slots) == 1 else np.logical_or.reduce([slot.touched for slot in slots])
        self.rows = joined_rows(slots)

    def make(self, bucket: Bucket | None = None) -> None:
        """Makes a bucket of it, or all; each once."""
        if len(self._slots) == 1:
            return
        flats = [slot.gradients for slot in self._slots]
        if bucket is None:
            weighted_sum(self.gradients, flats, self._weights)
        else:
            parts = [flat.elements(bucket) for flat in flats]
            _weighted_sum(parts[0], parts, self._weights)


def joined_rows(slots: Sequence[Slot]) -> dict[int, Tensor]:
    """Returns the rows that the sparse gradients of any of the slots have, ascending, by the parameter's place."""
    return {
        place: slots[0].rows[place].rows
        if len(slots) == 1
        else torch.unique(torch.cat([slot.rows[place].rows for slot in slots]))
        for place in slots[0].rows
    }


def weighted_sum(target: Flat, sources: Sequence[Flat], weights: Sequence[float]) -> None:
    """Sets `target`, which may be the first source, to the weighted sum of `sources`, added in the order given.

    float16 and bfloat16 are added in float32 and rounded once.
    """
    for number, storage in enumerate(target.storages):
        _weighted_sum(storage, [source.storages[number] for source in sources], weights)


@torch.no_grad()
def _weighted_sum(target: Tensor, sources: Sequence[Tensor], weights: Sequence[float]) -> None:
    first, *others = sources
    is_half = target.dtype in (torch.float16, torch.bfloat16)
    total = first.float() if is_half else target
    if total is not first and not is_half:
        total.copy_(first)
    total.mul_(weights[0])
    for addend, weight in zip(others, weights[1:], strict=True):
        total.add_(addend, alpha=weight)
    if is_half:
        target.copy_(total)


def combine_buffers(target: Flat, buffers: Mapping[int, Flat], samples: Mapping[int, int]) -> None:
    """Sets `target` to the mean of the workers' buffers, weighted by samples; integer ones to the largest.

    Running statistics are running means, so the mean over workers of each one's is what one process would have kept of
    all their batches (the spread between the workers' means aside). Workers without samples do not count.
    """
    counted = [worker for worker in buffers if samples[worker]]
    total = sum(samples[worker] for worker in counted)
    if not counted:
        return
    for number, storage in enumerate(target.storages):
        theirs = torch.stack([buffers[worker].storages[number] for worker in counted])
        if storage.is_floating_point() or storage.is_complex():
            shares = torch.tensor([samples[w] / total for w in counted], dtype=torch.float64, device=storage.device)
            storage.copy_((theirs.to(torch.promote_types(storage.dtype, torch.float64)) * shares[:, None]).sum(0))
        else:
            storage.copy_(theirs.amax(0))
