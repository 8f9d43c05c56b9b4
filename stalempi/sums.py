"""Adds gradients up over all ranks, bucket by bucket, while backward still goes on; knows no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stalempi.early import EarlyBuckets, FiniteCheck
from stalempi.flat import Flat
from stalempi.transport.base import PeerEnd
from stalempi.transport.staging import Copied, Copier, CopyQueue, copier_for

__all__ = ["BucketSums"]


class BucketSums:
    """The sums over all ranks of weighted gradients, one per bucket, in host memory; float32 where those are two bytes.

    Args:
        parameters: those that are trained.
        gradients: where their gradients lie, in the same order.
        bucket_bytes: about how many bytes one sum covers.
        overlap: False: nothing ever goes early.
        seen: returns the samples that the gradient is the mean of, as far as is known during backward.
        copier: brings gradients to host memory; that of their device by default.

    Attributes:
        totals: the sums; `end` adds them up.
        end: the transport's side, to be set before the first step.
        buckets: says what may go while backward goes on.
    """

    end: PeerEnd

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Flat,
        *,
        bucket_bytes: int,
        overlap: bool,
        seen: Callable[[], int],
        copier: Copier | None = None,
    ) -> None:
        self._seen = seen
        cure = "use Allreduce(overlap=False)"
        self.buckets = EarlyBuckets(parameters, gradients, bucket_bytes=bucket_bytes, overlap=overlap, cure=cure)
        self._slices = self.buckets.slices
        device = gradients.storages[0].device
        self._copier, self._on_host = copier or copier_for(device), copier is None and device.type == "cpu"
        self.totals = [self._copier.mirror(_wide(part)) for part in self._slices]
        self._copying = CopyQueue(self._sum)
        self._brought: list[Copied] = []
        self._weight = 0
        self._finite = FiniteCheck()

    def ready(self, place: int) -> None:
        """Is told that backward has this parameter's gradient; sends what is complete."""
        if not self.buckets.begun:
            self._weight = max(1, self._seen())
        for bucket in self.buckets.ready(place):
            self._finite.add(self._slices[bucket])
            self._send(bucket)
        self._copying.launch()
        self.end.progress()

    def is_finite(self) -> bool:
        """Returns whether this rank's gradient, complete now, has neither NaN nor infinity."""
        for part in self._slices[self.buckets.handed :]:
            self._finite.add(part)
        return self._finite.verdict()

    def send_rest(self, samples: int) -> None:
        """Sends what has not been sent, the gradient standing for `samples` samples.

        Raises ConfigError if the gradient is not the one that backward has begun to send.
        """
        self.buckets.judge(same=samples == self._weight)
        self._weight = samples
        for bucket in self.buckets.rest():
            self._send(bucket)
        self._copying.launch(wait=True)

    def send_zeros(self) -> None:
        """Takes part without a gradient."""
        self.settle()
        for place, total in enumerate(self.totals):
            total.zero_()
            self.end.sum(place)

    @torch.no_grad()
    def bring_back(self, samples: int) -> None:
        """Makes the gradients the sums over `samples`; all sums are complete."""
        for part, total in zip(self._slices, self.totals, strict=True):
            if self._on_host and part.dtype == total.dtype:
                torch.mul(total, 1 / samples, out=part)
            else:
                self._brought.append(self._copier.copy_in(part, total.mul_(1 / samples)))

    def settle(self) -> None:
        """Waits until nothing reads the sums."""
        for copied in self._brought:
            copied.synchronize()
        self._brought.clear()

    def _sum(self, place: int) -> None:
        self.end.sum(place)

    @torch.no_grad()
    def _send(self, place: int) -> None:
        part, total = self._slices[place], self.totals[place]
        if self._on_host and part.dtype == total.dtype:
            torch.mul(part, self._weight, out=total)
            copied = self._copier.mark()
        else:
            copied = self._copier.copy_out(total, part.to(total.dtype) * self._weight)
        self._copying.add(place, copied)
        self._copying.launch()


def _wide(part: Tensor) -> Tensor:
    """Returns an empty tensor of the type that `part` is added up in."""
    dtype = torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else part.dtype
    return torch.empty(part.shape, dtype=dtype)
