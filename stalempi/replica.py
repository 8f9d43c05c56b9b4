"""Holds one rank's copy of the model, laid out flat, and says what all ranks must agree on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stalempi.compress import Compression, Wire
from stalempi.errors import ConfigError
from stalempi.flat import MAX_BUCKET_BYTES, Bucket, Flat
from stalempi.shares import share_out
from stalempi.transport.base import Packet, Parts
from stalempi.transport.message import HEADER_BYTES, Buffer

__all__ = ["DEFAULT_BUCKET_BYTES", "Replica", "difference", "only"]

DEFAULT_BUCKET_BYTES = 1 << 20


class Replica:
    """A model whose trained parameters and persistent buffers are views of contiguous storage.

    Args:
        model: the model, already on its device.
        optimizer: the torch optimizer over (some of) its parameters.
        bucket_bytes: about how many bytes one message carries.
        direct: whether MPI takes the memory of the GPU on which the model is.
        compression: of gradients on their way to the server; None: they travel as they are.
        sparse: whether gradients that are sparse rows travel so; else they are made dense.
        share: (number, of): only the parameters of server `number` of several; server 0's has all that is not trained.

    Attributes:
        trained: the parameters that the optimizer holds, each once, in the model's order.
        params: their values. A gradient has the same layout.
        sparse: places of those whose gradients are sparse rows: weights of nn.Embedding(sparse=True) and its like.
        buffers: the model's persistent buffers (running statistics, counters).

    Parameters that the optimizer does not hold stay where they are; they only travel once, from the server at joining.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: int,
        direct: bool = False,
        compression: Compression | None = None,
        share: tuple[int, int] = (0, 1),
        sparse: bool = False,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        self.model, self.optimizer, self.bucket_bytes, self._direct = model, optimizer, bucket_bytes, direct
        self.compression = compression
        named = dict(model.named_parameters())
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = held - {id(p) for p in named.values()}
        if missing:
            raise ConfigError(
                f"the optimizer holds {len(missing)} parameter(s) that are not in the model given with it"
            )
        if not held:
            raise ConfigError("the optimizer holds no parameter")
        self._share = share
        trained = {name: p for name, p in named.items() if id(p) in held}
        server = share_out([p.nbytes for p in trained.values()], share[1])
        self._everywhere = trained
        self.names = [name for name, its in zip(trained, server, strict=True) if its == share[0]]
        self.trained = [named[name] for name in self.names]
        self.sparse = _sparse(model, self.trained) if sparse else frozenset[int]()
        self._fixed = {} if share[0] else {name: p for name, p in named.items() if id(p) not in held}
        self._persistent = {} if share[0] else _persistent_buffers(model)
        self.params = Flat(self.trained)
        self.params.adopt(self.trained)
        if not self.params.nbytes:
            where = f" of server {share[0]}: take fewer servers" if share[1] > 1 else ""
            raise ConfigError(f"nothing to train: the parameters have no elements{where}")
        self.buffers = Flat(list(self._persistent.values()))
        self.buffers.adopt(list(self._persistent.values()))
        self._hyper_keys = _hyper_keys(optimizer)
        self._hyper_count = sum(_width(g[key]) for g, keys in self._group_keys() for key in keys)
        self.layout = zlib.crc32("\n".join(self.describe()).encode())

    def describe(self, *, whole: bool = False) -> list[str]:
        """Returns the lines that must be the same on every rank; `whole`: those of the model, however it is shared."""
        trained = self._everywhere if whole else dict(zip(self.names, self.trained, strict=True))
        lines = [f"optimizer {type(self.optimizer).__name__}", f"bucket_bytes {self.bucket_bytes}"]
        lines += [f"sparse {self.names[place]}" for place in sorted(self.sparse) if not whole]
        lines += [f"share {self._share[0]} of {self._share[1]}"] if self._share[1] > 1 and not whole else []
        lines += [f"compression {self.compression}"] if self.compression else []
        lines += [f"parameter {name} {_shape(p)}" for name, p in trained.items()]
        lines += [f"untrained parameter {name} {_shape(p)}" for name, p in self._fixed.items()]
        lines += [f"buffer {name} {_shape(b)}" for name, b in self._persistent.items()]
        names = {id(p): name for name, p in trained.items()}
        for number, (group, keys) in enumerate(self._group_keys()):
            ours = [names[id(p)] for p in group["params"] if id(p) in names]
            members = zlib.crc32(" ".join(ours).encode())
            lines.append(f"group {number}: {len(ours)} parameters ({members:08x}), {', '.join(keys)}")
        return lines

    def state(self) -> Parts:
        """Returns everything that a worker takes over from the server at joining."""
        fixed = [p.data.contiguous() for p in self._fixed.values()]
        for p, values in zip(self._fixed.values(), fixed, strict=True):
            p.data = values
        flat = [
            piece
            for values in fixed
            for piece in values.view(-1).view(torch.uint8).split(MAX_BUCKET_BYTES)
            if piece.numel()
        ]
        return Parts([*self.params.buckets(1 << 26), *self.buffers.buckets(1 << 26), *flat], direct=self._direct)

    def wire(self, gradients: Flat, *, apart: bool = False) -> Wire:
        """Returns the form in which `gradients` travel; `apart`: in memory of their own in any case."""
        return Wire(
            gradients, bucket_bytes=self.bucket_bytes, compression=self.compression, apart=apart, sparse=self.sparse
        )

    def push_packet(self, wire: Wire, buffers: Flat, *, note_bytes: int = 0) -> Packet:
        """Returns the place of one worker's pushes: header, hyper-parameters, touched flags, note, gradients, buffers.

        Gradients are in backward order, the last layer's first. The note is what a checkpoint keeps of the worker
        itself.
        """
        tensors = [*wire.tensors, *buffers.buckets(self.bucket_bytes)]
        parts = Parts(tensors, direct=self._direct, varies=bool(self.sparse))
        return Packet(self.header_bytes + note_bytes, parts)

    @property
    def header_bytes(self) -> int:
        """Size of what goes before a gradient: header, hyper-parameters, touched flags; a note follows it."""
        return HEADER_BYTES + 8 * self._hyper_count + len(self.trained)

    def release_parts(self, params: Flat | None = None) -> Parts:
        """Returns the parameters, by default the model's, as a release carries them: the first layer's first."""
        return Parts((params or self.params).slices(self.release_buckets()), direct=self._direct)

    def release_buckets(self) -> list[Bucket]:
        """Returns where the parts of a release lie."""
        return self.params.cut_forward(self.bucket_bytes)

    def hyper(self, header: Buffer) -> NDArray[np.float64]:
        """Returns the place of the hyper-parameters in a push's header, float64."""
        return np.frombuffer(header, np.float64, self._hyper_count, HEADER_BYTES)

    def touched(self, header: Buffer) -> NDArray[np.bool_]:
        """Returns the place of the flags, one per trained parameter: whether it has a gradient in this step."""
        return np.frombuffer(header, np.bool_, len(self.trained), HEADER_BYTES + 8 * self._hyper_count)

    def note(self, packet: Packet) -> memoryview:
        """Returns the place of the worker's note in a push's header."""
        return memoryview(packet.header)[self.header_bytes :]

    def read_hyper(self) -> list[float]:
        """Returns the numeric hyper-parameters of all groups, in the order that `write_hyper` takes."""
        found: list[float] = []
        for group, keys in zip(self.optimizer.param_groups, self._hyper_keys, strict=True):
            for key in keys:
                value = group[key]
                if isinstance(value, (tuple, list)):
                    found.extend(value)
                else:
                    found.append(float(value))
        return found

    def write_hyper(self, values: Sequence[float]) -> None:
        """Sets the numeric hyper-parameters of all groups, each in the type it has."""
        rest = list(values)
        for group, keys in self._group_keys():
            for key in keys:
                width = _width(group[key])
                taken, rest = rest[:width], rest[width:]
                group[key] = _like(group[key], taken)

    def step_with(self, hyper: Sequence[float], factor: float) -> None:
        """Takes the optimizer's step with `hyper` and its rate times `factor`; the optimizer's own come back."""
        own, rates = self.read_hyper(), [group["lr"] for group in self.optimizer.param_groups]
        other = list(hyper) != own
        if other:
            self.write_hyper(hyper)
        if factor != 1.0:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        self.optimizer.step()
        if other:
            self.write_hyper(own)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _group_keys(self) -> list[tuple[dict[str, Any], list[str]]]:
        return list(zip(self.optimizer.param_groups, self._hyper_keys, strict=True))


def _sparse(model: nn.Module, trained: Sequence[nn.Parameter]) -> frozenset[int]:
    """Returns the places of parameters that modules make sparse gradients for, and that one message can carry."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = {id(m.weight) for m in model.modules() if isinstance(m, kinds) and m.sparse}
    return frozenset(n for n, p in enumerate(trained) if id(p) in found and 2 * p.nbytes < MAX_BUCKET_BYTES)


def difference(texts: Sequence[bytes], first: int = 0) -> str:
    """Returns how the descriptions differ from that of rank `first`, one clause per differing rank; "" if none does."""
    ours = texts[0].decode().split("\n")
    clauses = []
    for rank, text in enumerate(texts, start=first):
        theirs = text.decode().split("\n")
        if theirs == ours:
            continue
        clauses.append(f"rank {rank} has {only(theirs, ours)} where rank {first} has {only(ours, theirs)}")
    return "; ".join(clauses)


def only(mine: Sequence[str], others: Sequence[str]) -> str:
    """Returns, in words, the lines of `mine` that `others` lacks."""
    return _few([line for line in mine if line not in others])


def _few(lines: Sequence[str]) -> str:
    shown = ", ".join(f"'{line}'" for line in lines[:3]) or "another order"
    return shown + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def _shape(tensor: Tensor) -> str:
    kind = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} strides {tensor.stride()}{kind}"


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that `state_dict` holds, each once."""
    state = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in state and buffer.numel()}


def _hyper_keys(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    known = sorted(optimizer.defaults)
    return [[key for key in known if _width(group.get(key))] for group in optimizer.param_groups]


def _width(value: object) -> int:
    """Returns how many numbers a hyper-parameter is; 0 if it is none."""
    if isinstance(value, (bool, int, float)):
        return 1
    if isinstance(value, Tensor):
        return 1 if value.numel() == 1 else 0
    if isinstance(value, (tuple, list)) and all(isinstance(v, (int, float)) for v in value):
        return len(value)
    return 0


def _like(old: Any, numbers: Sequence[float]) -> object:
    if isinstance(old, (tuple, list)):
        return type(old)(numbers)
    if isinstance(old, Tensor):
        return torch.full_like(old, numbers[0])
    return type(old)(numbers[0])
