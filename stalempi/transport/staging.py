"""Copies between a device and pinned host memory beside the computation, and says when a copy is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Copied", "Copier", "CopyQueue", "CudaCopier", "HostCopier", "copier_for"]


class Copied(Protocol):
    """A copy that was begun."""

    def query(self) -> bool:
        """Returns whether it is there."""

    def synchronize(self) -> None:
        """Returns when it is there."""


class Copier(ABC):
    """What a device must be able to do so that its memory can be sent and received."""

    @abstractmethod
    def mirror(self, tensor: Tensor) -> Tensor:
        """Returns host memory of the same size, from which copies can go on by themselves."""

    @abstractmethod
    def mark(self) -> Copied:
        """Marks the present end of the computation's stream: it is there when all before it is done."""

    @abstractmethod
    def copy_out(self, host: Tensor, device: Tensor) -> Copied:
        """Begins to copy to the host what `device` holds once the computation's stream has come to this point."""

    @abstractmethod
    def copy_in(self, device: Tensor, host: Tensor) -> Copied:
        """Begins to copy to the device; what the computation does from here on finds it there."""


class CudaCopier(Copier):
    """A GPU of torch: copies run on a stream of their own, beside the kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def mirror(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def mark(self) -> Copied:
        marked: Copied = torch.cuda.current_stream(self._device).record_event()
        return marked

    def copy_out(self, host: Tensor, device: Tensor) -> Copied:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            host.copy_(device, non_blocking=True)
            device.record_stream(self._side)
            done: Copied = self._side.record_event()
        return done

    def copy_in(self, device: Tensor, host: Tensor) -> Copied:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            device.copy_(host, non_blocking=True)
            device.record_stream(self._side)
            done = self._side.record_event()
        torch.cuda.current_stream(self._device).wait_event(done)
        copied: Copied = done
        return copied


class _There:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


_THERE = _There()


class HostCopier(Copier):
    """Host memory beside host memory: a copy is there at once."""

    def mirror(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def mark(self) -> Copied:
        return _THERE

    def copy_out(self, host: Tensor, device: Tensor) -> Copied:
        host.copy_(device)
        return _THERE

    def copy_in(self, device: Tensor, host: Tensor) -> Copied:
        device.copy_(host)
        return _THERE


class CopyQueue:
    """Copies to the host on their way, in order, and what is to be done with each once it is there.

    Args:
        use: is given the place of each copy that is there, in the order in which they were added.
    """

    def __init__(self, use: Callable[[int], None]) -> None:
        self._use = use
        self._copying: deque[tuple[int, Copied]] = deque()

    def add(self, place: int, copied: Copied) -> None:
        """Takes a copy that was begun."""
        self._copying.append((place, copied))

    def launch(self, *, wait: bool = False) -> None:
        """Uses the copies that are there, up to the first that is not; all of them if told to wait."""
        while self._copying and (wait or self._copying[0][1].query()):
            place, copied = self._copying.popleft()
            copied.synchronize()
            self._use(place)


_COPIERS: dict[torch.device, Copier] = {}


def copier_for(device: torch.device) -> Copier:
    """Returns the copier of `device`, always the same one."""
    if device not in _COPIERS:
        _COPIERS[device] = CudaCopier(device) if device.type == "cuda" else HostCopier()
    return _COPIERS[device]
