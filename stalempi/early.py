"""Says which buckets of a gradient are complete while backward still goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.flat import Flat

__all__ = ["EarlyBuckets", "FiniteCheck"]


class EarlyBuckets:
    """The buckets of a gradient in the order in which backward makes them, the last layer first.

    The order is fixed, so that both sides of a message agree whatever becomes ready first. In the first step no bucket
    is early; it shows whether a gradient stays what one backward made it, and only then later ones are.

    Args:
        parameters: those that are trained.
        gradients: where their gradients lie, in the same order.
        bucket_bytes: about how many bytes a bucket holds.
        overlap: False: nothing is ever early.
        alone: places of parameters that are a bucket each.
        cure: what a program has to do whose gradients are changed after they were sent, in words.

    Attributes:
        slices: each bucket's elements; complex numbers as pairs.
        early: whether buckets are sent while backward goes on.
        handed: how many buckets were handed out since `begin`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Flat,
        *,
        bucket_bytes: int,
        overlap: bool,
        cure: str,
        alone: Set[int] = frozenset(),
    ) -> None:
        self._parameters, self._storages, self._cure = parameters, gradients.storages, cure
        buckets = gradients.cut_backward(bucket_bytes, alone)
        self.slices = [gradients.elements(bucket) for bucket in buckets]
        self._views = [bucket.views for bucket in buckets]
        self._buckets_of: list[list[int]] = [[] for _ in parameters]
        for place, views in enumerate(self._views):
            for view in views:
                self._buckets_of[view].append(place)
        self.early, self._undecided = False, overlap
        self._version = 0
        self.begin()

    @property
    def may_be_early(self) -> bool:
        """Whether buckets are early, or may turn out to be."""
        return self.early or self._undecided

    @property
    def begun(self) -> bool:
        """Whether backward has made a gradient since `begin`."""
        return self._count > 0

    def begin(self) -> None:
        """Makes ready for a step: no bucket is handed out, no gradient is there."""
        self.handed = self._count = 0
        self._upset = False

    def zeroed(self) -> None:
        """Is told that all gradients have been set to zero."""
        self._upset = self._upset or self.begun

    def ready(self, place: int) -> range:
        """Is told that backward has this parameter's gradient; returns the buckets that are to be sent now."""
        if not self._count:
            self._begin_backward()
        self._count += 1
        self._version = self._versions()
        if self._fired[place]:
            self._upset = True  # a second backward
        else:
            self._fired[place] = True
            for bucket in self._buckets_of[place]:
                self._missing[bucket] -= 1
        end = self.handed
        while self.early and end < len(self.slices) and self._missing[end] <= 0:
            end += 1
        return self._hand_out(end)

    def rest(self) -> range:
        """Returns the buckets that have not been handed out."""
        return self._hand_out(len(self.slices))

    def judge(self, *, same: bool = True) -> None:
        """Finds out, in `step`, whether the gradient is what one backward made, and so whether it may be sent early.

        `same` says whether all else is as it was when backward began. Raises ConfigError if the gradient is not the one
        that was handed out.
        """
        as_made = not self._upset and (not self.begun or (same and self._versions() == self._version))
        if not as_made and self.handed:
            raise ConfigError(
                "the gradient was changed after backward had begun to send it (clipping, a second backward, a step "
                f"left out): {self._cure}"
            )
        if self._undecided or not as_made:
            self.early = self._undecided and as_made and self.begun
            self._undecided = False

    def _begin_backward(self) -> None:
        """Counts what each bucket waits for, by the parameters that are not frozen now."""
        self._fired = [False] * len(self._parameters)
        wanted = [parameter.requires_grad for parameter in self._parameters]
        self._missing = [sum(wanted[view] for view in views) for views in self._views]

    def _hand_out(self, end: int) -> range:
        found = range(self.handed, end)
        self.handed = end
        return found

    def _versions(self) -> int:
        return sum(storage._version for storage in self._storages)


class FiniteCheck:
    """Whether a gradient has neither NaN nor infinity, told part by part: a sum is finite only if all elements are."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, part: Tensor) -> None:
        """Looks at a part, real numbers of any dtype; on a GPU nothing waits for the result."""
        self._parts.append(part)
        self._sums.append(part.sum())

    def verdict(self) -> bool:
        """Returns whether all parts added since the last verdict are finite; if a sum overflows, element by element."""
        sums, self._sums = self._sums, []
        parts, self._parts = self._parts, []
        if len(sums) == 1:
            finite = math.isfinite(sums[0].item())
        else:
            finite = not sums or bool(torch.isfinite(torch.stack([total.double() for total in sums])).all())
        return finite or all(bool(torch.isfinite(part).all()) for part in parts)
