"""Says in what form a gradient travels: as it is, rounded to two bytes, its largest elements only, or its rows.

A gradient goes bucket by bucket, in backward order (`Flat.cut_backward`). Each bucket has a place on the wire, whose
memory is sent, and a code that writes a gradient there and reads it back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from typing import ClassVar

import torch
from torch import Tensor

from stalempi.errors import ConfigError, ProtocolError
from stalempi.flat import Flat
from stalempi.pages import zeros

__all__ = ["COMPRESSIONS", "Compression", "Half", "Rows", "TopK", "Wire", "make_compression"]

COMPRESSIONS = "none, fp16, bf16 or topk:SHARE"


class Code(ABC):
    """The form of one bucket.

    Args:
        part: the bucket's elements, 1-D and real, where a gradient is written from and read into.

    Attributes:
        wire: what is sent, 1-D and contiguous.
        checked: what is finite if the bucket is, once it is encoded.
        length: bytes of the wire that are sent; None: all.
    """

    wire: Tensor
    checked: Tensor
    length: int | None = None

    def __init__(self, part: Tensor) -> None:
        self._part = part

    @abstractmethod
    def encode(self) -> None:
        """Writes the bucket's gradient to the wire."""

    @abstractmethod
    def decode(self) -> None:
        """Reads what arrived on the wire into the bucket."""

    def clean(self) -> None:
        """Forgets what is not finite, for the gradient just encoded was not."""
        return


class _AsItIs(Code):
    """The bucket's own memory is sent, without a copy."""

    def __init__(self, part: Tensor) -> None:
        super().__init__(part)
        self.wire = self.checked = part

    def encode(self) -> None:
        pass

    def decode(self) -> None:
        pass


class _Copied(Code):
    """A copy is sent, so that the gradient may change meanwhile."""

    def __init__(self, part: Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__(part)
        self.wire = self.checked = zeros(len(part), dtype or part.dtype, part.device)

    @torch.no_grad()
    def encode(self) -> None:
        self.wire.copy_(self._part)

    @torch.no_grad()
    def decode(self) -> None:
        self._part.copy_(self.wire)


class _Largest(Code):
    """The elements of largest magnitude, with what was left out so far added to them (error feedback).

    On the wire: their values, then their places, int32.
    """

    def __init__(self, part: Tensor, count: int) -> None:
        super().__init__(part)
        edge = count * part.itemsize
        self.wire = zeros(edge + 4 * count, torch.uint8, part.device)
        self.checked = part
        self._values, self._places = self.wire[:edge].view(part.dtype), self.wire[edge:].view(torch.int32)
        self._rest: Tensor | None = None  # what was left out; only a sender has it

    @torch.no_grad()
    def encode(self) -> None:
        if self._rest is None:
            self._rest = torch.zeros_like(self._part)
        self._rest.add_(self._part)
        places = self._rest.abs().topk(len(self._places), sorted=False).indices
        self._places.copy_(places)
        self._values.copy_(self._rest[places])
        self._rest[places] = 0

    @torch.no_grad()
    def decode(self) -> None:
        self._part.zero_()
        self._part[self._places.long()] = self._values

    @torch.no_grad()
    def clean(self) -> None:
        if self._rest is not None:
            self._rest.nan_to_num_(0.0, 0.0, 0.0)


class Rows(Code):
    """The rows of a matrix that have a gradient, as `nn.Embedding(sparse=True)` makes it.

    On the wire: how many they are, their numbers, int64, then their values; there is room for all rows.

    Args:
        matrix: (rows, width), where the gradient is written from and read into.

    Attributes:
        rows: numbers of those that have a gradient, ascending; set by whoever encodes, and by `decode`.
    """

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        count, width = matrix.shape
        self._row = 8 + width * matrix.itemsize
        self.wire = zeros(8 + count * self._row, torch.uint8, matrix.device)
        self.rows = torch.empty(0, dtype=torch.int64, device=matrix.device)
        self.length = 8

    @torch.no_grad()
    def encode(self) -> None:
        count = len(self.rows)
        self.length = 8 + count * self._row
        numbers, values = self._places(count)
        self.wire[:8].view(torch.int64)[0] = count
        numbers.copy_(self.rows)
        values.copy_(self._part[self.rows])
        self.checked = values

    @torch.no_grad()
    def decode(self) -> None:
        count = int(self.wire[:8].view(torch.int64))
        if not 0 <= count <= len(self._part):
            raise ProtocolError(f"{count} rows came of a matrix that has {len(self._part)}")
        numbers, values = self._places(count)
        if count and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self._part):
            raise ProtocolError(f"row {int(numbers.max())} came of a matrix that has {len(self._part)}")
        self._part[self.rows] = 0
        self.rows = numbers.clone()
        self._part[self.rows] = values

    def _places(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns where the numbers and the values of `count` rows are on the wire."""
        edge, width = 8 + 8 * count, self._part.shape[1]
        values = self.wire[edge : edge + count * width * self._part.itemsize].view(self._part.dtype)
        return self.wire[8:edge].view(torch.int64), values.view(count, width)


class Compression(ABC):
    """What becomes of gradients on their way to the server.

    Attributes:
        keeps_rest: whether a push may bring some of what earlier gradients were.
    """

    keeps_rest: ClassVar[bool] = False

    @abstractmethod
    def code(self, part: Tensor) -> Code:
        """Returns the form of a bucket of float32 or float64."""


class Half(Compression):
    """Rounds to a type of two bytes; the server widens and adds up as ever. MPI sees bytes.

    Args:
        dtype: torch.float16, which overflows at 65,504, or torch.bfloat16, which has 8 bits of precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __str__(self) -> str:
        return "fp16" if self._dtype is torch.float16 else "bf16"

    def code(self, part: Tensor) -> Code:
        """Returns a copy in two bytes."""
        return _Copied(part, self._dtype)


class TopK(Compression):
    """Sends the largest elements of each bucket, and adds the rest to the next gradient (error feedback).

    Args:
        share: of each bucket's elements that are sent, above 0 and at most 1; at least one is.

    Source: deep gradient compression's sparsification with local accumulation, without its momentum correction.
    """

    keeps_rest: ClassVar[bool] = True

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"topk:{share:g}: the share must be above 0 and at most 1, such as topk:0.01")
        self._share = share

    def __str__(self) -> str:
        return f"topk:{self._share:g}"

    def code(self, part: Tensor) -> Code:
        """Returns the largest elements with their places."""
        return _Largest(part, math.ceil(self._share * part.numel()))


class Wire:
    """A gradient's form on the wire.

    Args:
        gradients: written from and read into.
        bucket_bytes: about how many bytes of gradient a bucket has.
        compression: of buckets that are float32 or float64; None: they travel as they are.
        apart: whether memory of its own is sent even where nothing is compressed.
        sparse: places of the matrices of which only rows are sent.

    Attributes:
        codes: the form of each bucket, in backward order.
        rows: the form of each sparse matrix, by its place.
    """

    def __init__(
        self,
        gradients: Flat,
        *,
        bucket_bytes: int,
        compression: Compression | None,
        apart: bool = False,
        sparse: Set[int] = frozenset(),
    ) -> None:
        self.rows = {place: Rows(gradients.views[place]) for place in sorted(sparse)}
        self.codes: Sequence[Code] = [
            self.rows[bucket.views[0]]
            if bucket.views[0] in sparse
            else _code_of(gradients.elements(bucket), compression, apart=apart)
            for bucket in gradients.cut_backward(bucket_bytes, sparse)
        ]
        self._changes = compression is not None or bool(sparse)

    @property
    def lengths(self) -> dict[int, int]:
        """Bytes that are sent of those places that have room for more."""
        return {place: code.length for place, code in enumerate(self.codes) if code.length is not None}

    @property
    def tensors(self) -> list[Tensor]:
        """What is sent: 1-D uint8, one of each bucket."""
        return [code.wire.view(torch.uint8) for code in self.codes]

    def encode(self) -> None:
        """Writes all buckets."""
        for code in self.codes:
            code.encode()

    def decode(self) -> None:
        """Reads all buckets."""
        if self._changes:
            for code in self.codes:
                code.decode()

    def clean(self) -> None:
        """Forgets what is not finite."""
        for code in self.codes:
            code.clean()


def _code_of(part: Tensor, compression: Compression | None, *, apart: bool) -> Code:
    if compression and part.dtype in (torch.float32, torch.float64):
        return compression.code(part)
    return _Copied(part) if apart else _AsItIs(part)


def make_compression(text: str) -> Compression | None:
    """Reads "none", "fp16", "bf16" or "topk:SHARE"; ConfigError otherwise."""
    name, colon, share = text.partition(":")
    if not colon and name in ("none", "fp16", "bf16"):
        return {"none": None, "fp16": Half(torch.float16), "bf16": Half(torch.bfloat16)}[name]
    if name == "topk" and colon:
        try:
            return TopK(float(share))
        except ValueError:
            pass
    raise ConfigError(f"compression must be {COMPRESSIONS}, such as topk:0.01, got {text!r}")
