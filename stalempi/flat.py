"""Lays tensors out as views of contiguous storage, so that what is sent is never copied first."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from stalempi.errors import ConfigError
from stalempi.pages import zeros

__all__ = ["ALIGNMENT", "MAX_BUCKET_BYTES", "Bucket", "Flat"]

# Every view starts at a multiple of this many bytes, as a tensor of its own would: vectorised kernels then split
# their work in the same places and give the same bits.
ALIGNMENT = 64

# One MPI message stays below the 2^31 - 1 elements that older MPI libraries can count.
MAX_BUCKET_BYTES = 1 << 30


@dataclass(frozen=True)
class Bucket:
    """A slice of a storage.

    Attributes:
        storage: which one, by its place.
        start, stop: where the slice lies, in bytes.
        views: places of the views that reach into it.
    """

    storage: int
    start: int
    stop: int
    views: tuple[int, ...]


class Flat:
    """Tensors of any dtypes as views of one contiguous storage per dtype.

    Args:
        tensors: the tensors to lay out, dense and all on one device; only their shape, strides and dtype are used.
        device: where the storage is to be; theirs by default.

    Attributes:
        storages: one 1-D tensor per dtype, in order of first appearance; zero at first.
        views: for each tensor given, a view of a storage with its shape and strides (channels_last stays so).
    """

    def __init__(self, tensors: Sequence[Tensor], device: str | None = None) -> None:
        self._templates = [(t.shape, _dense_strides(t), t.dtype) for t in tensors]
        if any(t.device != tensors[0].device for t in tensors):
            raise ConfigError("all parameters and buffers of a rank must be on one device: move the model first")
        self._device = torch.device(device) if device else tensors[0].device if tensors else torch.device("cpu")
        self._starts, sizes = self._place()
        self._dtypes = list(sizes)
        self.storages = [zeros(size, dtype, self._device) for dtype, size in sizes.items()]
        self.views = self._make_views()

    def _place(self) -> tuple[list[int], dict[torch.dtype, int]]:
        starts: list[int] = []
        sizes: dict[torch.dtype, int] = {}
        for shape, _, dtype in self._templates:
            step = max(1, ALIGNMENT // dtype.itemsize)
            start = sizes.setdefault(dtype, 0)
            starts.append(start)
            sizes[dtype] = start + -(-shape.numel() // step) * step
        return starts, sizes

    def _make_views(self) -> list[Tensor]:
        by_dtype = dict(zip(self._dtypes, self.storages, strict=True))
        return [
            by_dtype[dtype].as_strided(shape, strides, start)
            for (shape, strides, dtype), start in zip(self._templates, self._starts, strict=True)
        ]

    def places(self) -> list[tuple[int, int, int]]:
        """Returns for each view its storage, and the elements of it from the first to behind the last."""
        number = {dtype: n for n, dtype in enumerate(self._dtypes)}
        return [
            (number[dtype], start, start + shape.numel())
            for (shape, _, dtype), start in zip(self._templates, self._starts, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes in all storages."""
        return sum(storage.nbytes for storage in self.storages)

    def like(self, device: str | None = None) -> Flat:
        """Returns a Flat of the same layout with storages of its own, zero at first, here or on `device`."""
        return Flat(self.views, device)

    def zero(self) -> None:
        """Sets every element to zero."""
        for storage in self.storages:
            storage.zero_()

    @torch.no_grad()
    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Copies the values of `tensors` in and makes each of them a view of this storage."""
        for tensor, view in zip(tensors, self.views, strict=True):
            view.copy_(tensor)
            tensor.data = view

    @torch.no_grad()
    def move(self, tensors: Sequence[Tensor], storages: Sequence[Tensor]) -> list[Tensor]:
        """Moves the values, and `tensors` with them, to `storages` of the same sizes; returns the old storages.

        What still reads the old storages (a send on its way) goes on reading the old values.
        """
        old = self.storages
        self.storages = list(storages)
        for new, before in zip(self.storages, old, strict=True):
            new.copy_(before)
        self.views = self._make_views()
        for tensor, view in zip(tensors, self.views, strict=True):
            tensor.data = view
        return old

    def buckets(self, bucket_bytes: int) -> list[Tensor]:
        """Cuts the storages into contiguous 1-D uint8 slices, as `cut` says."""
        return self.slices(self.cut(bucket_bytes))

    def slices(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Returns the buckets' bytes, 1-D uint8."""
        raw = [storage.view(torch.uint8) for storage in self.storages]
        return [raw[bucket.storage][bucket.start : bucket.stop] for bucket in buckets]

    def cut_forward(self, bucket_bytes: int, alone: Set[int] = frozenset()) -> list[Bucket]:
        """Cuts as `cut` does, at whole elements, in the order in which forward needs them: the first layer first."""
        return self.cut(max(ALIGNMENT, bucket_bytes // ALIGNMENT * ALIGNMENT), alone)

    def cut_backward(self, bucket_bytes: int, alone: Set[int] = frozenset()) -> list[Bucket]:
        """Cuts as `cut_forward` does, in the order in which backward makes gradients: the last one first."""
        return self.cut_forward(bucket_bytes, alone)[::-1]

    def elements(self, bucket: Bucket) -> Tensor:
        """Returns a bucket's elements, 1-D; complex numbers as pairs, which add up alike."""
        storage = self.storages[bucket.storage]
        part = storage[bucket.start // storage.itemsize : bucket.stop // storage.itemsize]
        return torch.view_as_real(part).view(-1) if part.is_complex() else part

    def cut(self, bucket_bytes: int, alone: Set[int] = frozenset()) -> list[Bucket]:
        """Cuts the storages into slices of about `bucket_bytes`, in the order of the views.

        A bucket ends where a tensor ends, so that it is complete when its last gradient is; a tensor larger than
        `bucket_bytes` is a run of buckets of its own. The views at the places `alone` are one bucket each.
        """
        found: list[Bucket] = []
        for number, (dtype, storage) in enumerate(zip(self._dtypes, self.storages, strict=True)):
            views = [view for view, (_, _, d) in enumerate(self._templates) if d == dtype]
            edges = [self._starts[view] * dtype.itemsize for view in views] + [storage.nbytes]
            cuts = [edges[0]]
            for is_alone, run in itertools.groupby(range(len(views)), key=lambda n: views[n] in alone):
                places = list(run)
                inner = edges[places[0] : places[-1] + 2]
                cuts += (inner if is_alone else _cut(inner, min(bucket_bytes, MAX_BUCKET_BYTES)))[1:]
            for start, stop in itertools.pairwise(cuts):
                first, last = bisect_right(edges, start) - 1, bisect_left(edges, stop)
                if stop > start:
                    found.append(Bucket(number, start, stop, tuple(views[first:last])))
        return found


def _cut(edges: Sequence[int], limit: int) -> list[int]:
    """Returns the byte offsets to cut at: as few as `limit` allows, at edges where a tensor fits."""
    cuts = [edges[0]]
    for previous, edge in itertools.pairwise(edges):
        if edge - cuts[-1] > limit and previous > cuts[-1]:
            cuts.append(previous)
        while edge - cuts[-1] > limit:
            cuts.append(cuts[-1] + limit)
    return [*cuts, edges[-1]]


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns strides that fill memory without holes in the order of `tensor`'s own (channels_last is kept)."""
    return tuple(torch.empty_like(tensor, memory_format=torch.preserve_format).stride())
