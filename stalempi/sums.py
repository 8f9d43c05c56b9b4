"""Adds gradients up over all ranks, bucket by bucket, while backward still goes on; knows no MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.flat import Flat
from stalempi.transport.base import PeerEnd
from stalempi.transport.staging import Copied, Copier, copier_for

__all__ = ["BucketSums"]


class BucketSums:
    """The sums over all ranks of weighted gradients, one per bucket, in host memory.

    Buckets go in the order in which backward makes them, the last layer first. It is fixed, so that ranks agree
    whatever becomes ready first on each. In the first step nothing goes before `send_rest`; it shows whether gradients
    stay what backward made them, and only then do later steps send early.

    Sums are float32 where gradients are float16 or bfloat16.

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
        early: whether buckets are sent while backward goes on.
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
        self._parameters, self._storages, self._seen = parameters, gradients.storages, seen
        self._buckets = gradients.cut(max(64, bucket_bytes // 64 * 64))[::-1]  # whole elements of any dtype
        self._slices = [_elements(self._storages[b.storage], b.start, b.stop) for b in self._buckets]
        device = self._storages[0].device
        self._copier, self._on_host = copier or copier_for(device), copier is None and device.type == "cpu"
        self.totals = [self._copier.mirror(_wide(part)) for part in self._slices]
        self._buckets_of: list[list[int]] = [[] for _ in parameters]
        for place, bucket in enumerate(self._buckets):
            for view in bucket.views:
                self._buckets_of[view].append(place)
        self._copying: deque[tuple[int, Copied]] = deque()
        self._brought: list[Copied] = []
        self.early, self._undecided = False, overlap
        self._weight = self._version = 0
        self.begin()

    def begin(self) -> None:
        """Makes ready for a step: no bucket is sent, no gradient is there."""
        self._next = 0
        self._upset = False
        self._fired = [0] * len(self._parameters)
        wanted = [parameter.requires_grad for parameter in self._parameters]
        self._missing = [sum(wanted[view] for view in bucket.views) for bucket in self._buckets]

    def zeroed(self) -> None:
        """Is told that all gradients have been set to zero."""
        self._upset = self._upset or any(self._fired)

    def ready(self, place: int) -> None:
        """Is told that backward has this parameter's gradient; sends what is complete."""
        if not any(self._fired):
            self._weight = max(1, self._seen())
        self._fired[place] += 1
        self._version = self._versions()
        if self._fired[place] == 1:
            for bucket in self._buckets_of[place]:
                self._missing[bucket] -= 1
        while self.early and self._next < len(self._slices) and self._missing[self._next] <= 0:
            self._send()
        self._launch()
        self.end.progress()

    def send_rest(self, samples: int) -> None:
        """Sends what has not been sent, the gradient standing for `samples` samples.

        Raises ConfigError if the gradient is not the one that backward has begun to send.
        """
        self._judge(samples)
        self._weight = samples
        while self._next < len(self._slices):
            self._send()
        self._launch(wait=True)

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

    @torch.no_grad()
    def _send(self) -> None:
        part, total = self._slices[self._next], self.totals[self._next]
        if self._on_host and part.dtype == total.dtype:
            torch.mul(part, self._weight, out=total)
            copied = self._copier.mark()
        else:
            copied = self._copier.copy_out(total, part.to(total.dtype) * self._weight)
        self._copying.append((self._next, copied))
        self._next += 1
        self._launch()

    def _launch(self, *, wait: bool = False) -> None:
        """Begins the sums whose gradients are in host memory; also those on their way there if told to wait."""
        while self._copying and (wait or self._copying[0][1].query()):
            place, copied = self._copying.popleft()
            copied.synchronize()
            self.end.sum(place)

    def _versions(self) -> int:
        return sum(storage._version for storage in self._storages)

    def _judge(self, samples: int) -> None:
        """Finds out whether the gradient is what one backward made, and so whether it may be sent early."""
        as_made = not (self._upset or max(self._fired) > 1)
        if any(self._fired):
            as_made = as_made and self._versions() == self._version and samples == self._weight
        if not as_made and self._next:
            raise ConfigError(
                "the gradient was changed after backward had begun to send it (clipping, a second backward, another "
                "number of samples than the model saw): use Allreduce(overlap=False)"
            )
        if self._undecided or not as_made:
            self.early = self._undecided and as_made
            self._undecided = False


def _elements(storage: Tensor, start: int, stop: int) -> Tensor:
    """Returns the elements between two places in bytes; complex numbers as pairs, which add up alike."""
    part = storage[start // storage.itemsize : stop // storage.itemsize]
    return torch.view_as_real(part).view(-1) if part.is_complex() else part


def _wide(part: Tensor) -> Tensor:
    """Returns an empty tensor of the type that `part` is added up in."""
    dtype = torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else part.dtype
    return torch.empty(part.shape, dtype=dtype)
