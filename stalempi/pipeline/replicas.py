"""Averages a block's gradients over the copies of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stalempi.pipeline.link import Lane, Links, Note, Receiver, Sender

__all__ = ["Replicas"]


@dataclass(frozen=True)
class _Copy:
    """Another copy of this block."""

    sends: Sender
    receives: Receiver


class Replicas:
    """The copies of one block. The first adds up in the order of the copies, so that all get the same bits.

    Args:
        links: of this rank.
        ranks: of the copies, in order.
        rank: this one.
        timeout: seconds of silence of a copy that end the job.
        device: where this rank computes.

    Attributes:
        wish: set on the leading copy, for all of them; the next update takes it along.
        note: the strongest wish that has come since it was last taken: every copy has it after the same update.
    """

    def __init__(self, links: Links, ranks: Sequence[int], rank: int, *, timeout: float, device: torch.device) -> None:
        def open_lane(lane: Lane) -> list[_Copy]:
            others = [r for r in ranks if r != rank] if self._leads else [ranks[0]]
            return [
                _Copy(
                    links.sender(other, lane, 1, timeout=timeout),
                    links.receiver(other, lane, 1, timeout=timeout, device=device),
                )
                for other in others
            ]

        self._leads = rank == ranks[0]
        self._start, self._copies = open_lane(Lane.START), open_lane(Lane.REPLICA)
        self._count = 0
        self.wish = self.note = Note.NONE

    @torch.no_grad()
    def share_start(self, tensors: Sequence[Tensor]) -> None:
        """Gives all copies the first one's values, in place."""
        for place, tensor in enumerate(tensors):
            if not self._leads:
                tensor.copy_(self._start[0].receives.receive((place, 0))[0])
            for copy in self._start if self._leads else ():
                copy.sends.send((place, 0), [tensor.detach()])
        for copy in self._start:
            copy.sends.flush()

    def close(self) -> None:
        """Takes back what was posted for messages that will not come."""
        for copy in self._copies:
            copy.sends.flush()
            copy.receives.close()

    def average(self, gradients: Sequence[Tensor], samples: int) -> int:
        """Makes gradients their mean over the copies, each weighted by its samples; returns the samples of all."""
        packed = _pack(gradients)
        mine = [*(flat * samples for flat in packed), torch.tensor([float(samples)], dtype=torch.float64)]
        self._count += 1
        key = self._count, 0
        if self._leads:
            for copy in self._copies:
                mine = [a + b.to(a.device) for a, b in zip(mine, copy.receives.receive(key), strict=True)]
            told = torch.tensor([mine[-1].item(), float(self.wish)], dtype=torch.float64)
            self.wish = Note.NONE
            means = [*(flat / mine[-1].item() for flat in mine[:-1]), told]
            for copy in self._copies:
                copy.sends.send(key, means)
        else:
            self._copies[0].sends.send(key, mine)
            means = list(self._copies[0].receives.receive(key))
        _unpack(means[:-1], gradients)
        self.note = max(self.note, Note(int(means[-1][1])))
        return int(means[-1][0])


def _kinds(tensors: Sequence[Tensor]) -> list[torch.dtype]:
    return sorted({tensor.dtype for tensor in tensors}, key=str)


def _pack(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Joins tensors into one flat tensor for each dtype."""
    return [torch.cat([t.detach().flatten() for t in tensors if t.dtype == kind]) for kind in _kinds(tensors)]


def _unpack(packed: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for kind, flat in zip(_kinds(tensors), packed, strict=True):
        own = [t for t in tensors if t.dtype == kind]
        for tensor, piece in zip(own, flat.split([t.numel() for t in own]), strict=True):
            tensor.copy_(piece.view_as(tensor))
