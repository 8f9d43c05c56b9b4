"""Lets the ranks that compute speak to each other between steps: sums, broadcasts, a barrier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.flat import MAX_BUCKET_BYTES
from stalempi.packing import pack, unpack
from stalempi.replica import difference
from stalempi.transport.base import Numbers, Parts, Transport

__all__ = ["Peers"]

OPERATIONS = ("mean", "sum", "min", "max")
V = TypeVar("V")


class Peers:
    """The ranks of a job that compute, numbered as their shards are.

    Each call is made by all of them, in the same order; what they call is compared first, so that a rank that calls
    something else is named instead of waited for.

    Args:
        transport: joins exactly these ranks.
        first: rank in the job of the first of them.
        timeout: seconds for which one waits for the others before StallError.
    """

    def __init__(self, transport: Transport, *, first: int, timeout: float) -> None:
        self._transport, self._first, self._timeout = transport, first, timeout
        self._calls = 0

    @torch.no_grad()
    def allreduce(self, value: V, op: str, name: str | None) -> V:
        """Returns what `stalempi.allreduce` says."""
        if op not in OPERATIONS:
            raise ConfigError(f"op must be one of {', '.join(OPERATIONS)}, got {op!r}")
        numbers, words = _numbers(value, op)
        self._agree([f"allreduce {op} of {words}{f' named {name}' if name else ''}"])
        self._transport.allreduce(numbers, "sum" if op == "mean" else op, self._timeout)
        if op == "mean":
            numbers /= self._transport.size
        return _like(value, numbers, op)

    def broadcast_object(self, obj: Any, root: int, name: str | None = None) -> Any:
        """Returns what `stalempi.broadcast_object` says."""
        mine = self._is_root(root)
        text, tensors = pack(obj) if mine else ("", [])
        self._agree([f"broadcast_object from {root}{f' named {name}' if name else ''}"])
        data = text.encode()
        size = torch.tensor([len(data)], dtype=torch.int64)
        self._broadcast([size], root)
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8) if mine else _bytes(int(size))
        self._broadcast([body], root)
        if mine:
            self._broadcast(tensors, root)
            return obj
        return unpack(body.numpy().tobytes().decode(), lambda empty: self._broadcast(empty, root))

    @torch.no_grad()
    def broadcast_parameters(self, given: nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]], root: int) -> None:
        """Does what `stalempi.broadcast_parameters` says."""
        mine = self._is_root(root)
        named = dict(given.state_dict() if isinstance(given, nn.Module) else given)
        if stray := [name for name, value in named.items() if not isinstance(value, Tensor)]:
            raise ConfigError(f"{stray[0]!r} is no tensor: broadcast_object takes other values")
        lines = [f"tensor {name} {tuple(t.shape)} {str(t.dtype)[6:]}" for name, t in named.items()]
        self._agree([f"broadcast_parameters from {root}", *lines])
        dense = [tensor.detach().contiguous() for tensor in named.values()]
        self._broadcast(dense, root)
        if not mine:
            for tensor, values in zip(named.values(), dense, strict=True):
                tensor.detach().copy_(values)  # a copy of itself where it was contiguous, else from another place

    def barrier(self) -> None:
        """Returns once every one of the ranks has called it."""
        self._agree(["barrier"])

    def close(self) -> None:
        """Frees the transport."""
        self._transport.close()

    def _agree(self, lines: Sequence[str]) -> None:
        """Makes sure that every rank makes the same call; ConfigError says who does not."""
        self._calls += 1
        text = "\n".join([f"call {self._calls}", *lines]).encode()
        texts = self._transport.allgather(text, self._timeout)
        if any(theirs != text for theirs in texts):
            raise ConfigError(f"the ranks call different collectives: {difference(texts, self._first)}")

    def _is_root(self, root: int) -> bool:
        if not 0 <= root < self._transport.size:
            last = self._transport.size - 1
            raise ConfigError(f"root={root}: the ranks that compute are numbered 0 to {last}, the server is not one")
        return self._transport.rank == root

    def _broadcast(self, tensors: Sequence[Tensor], root: int) -> None:
        """Copies the root's contiguous `tensors` into everybody's."""
        raw = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        chunks = [chunk for flat in raw for chunk in flat.split(MAX_BUCKET_BYTES)]
        self._transport.broadcast(Parts(chunks), self._timeout, root)


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _numbers(value: object, op: str) -> tuple[Numbers, str]:
    """Returns a host copy of `value` in a type that MPI adds up right, and what it is, in words."""
    array: np.ndarray[Any, Any]
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex():
            raise ConfigError(f"allreduce takes dense tensors of real numbers, got {value.layout} {value.dtype}")
        kind, words = value.dtype, f"a tensor {tuple(value.shape)} {str(value.dtype)[6:]}"
        half = value.is_floating_point() and kind != torch.float64
        array = value.detach().to("cpu", torch.float32 if half else kind).contiguous().numpy()
    elif isinstance(value, (np.ndarray, np.generic)):
        array, words = np.asarray(value), f"an array {value.shape} {value.dtype}"
    elif isinstance(value, (bool, int, float)):
        array, words = np.asarray(float(value) if op == "mean" else value), f"a number ({type(value).__name__})"
    else:
        raise ConfigError(f"allreduce takes numbers, numpy arrays and tensors, got {type(value).__name__}")
    is_float = array.dtype in (np.float16, np.float32, np.float64)
    if not is_float and (array.dtype.kind not in "biu" or array.dtype == np.uint64):
        raise ConfigError(f"allreduce cannot add up {array.dtype}: give float64, int64 or a smaller type of number")
    if not is_float and op == "mean":
        raise ConfigError(f"the mean of {array.dtype} is no such number: use op='sum', or floating point")
    if array.dtype.kind == "b" and array.ndim and op == "sum":
        raise ConfigError("a sum of booleans is none: use op='max' for any, 'min' for all, or give integers")
    if not is_float:
        return np.array(array, dtype=np.int64, order="C"), words
    if array.dtype == np.float64:
        return np.array(array, dtype=np.float64, order="C"), words
    return np.array(array, dtype=np.float32, order="C"), words


def _like(value: V, numbers: Numbers, op: str) -> V:
    """Returns the result in the form of `value`."""
    result: Any
    if isinstance(value, Tensor):
        result = torch.from_numpy(numbers).reshape(value.shape).to(value.device, value.dtype)
    elif isinstance(value, np.ndarray):
        result = numbers.astype(value.dtype)
    elif isinstance(value, np.generic):
        result = numbers.astype(value.dtype)[()]
    else:
        result = numbers.item()
        if isinstance(value, bool) and op in ("min", "max"):
            result = bool(result)
    return result  # type: ignore[no-any-return]
