"""Says how much memory a server holds, and for what."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from stalempi.holder import Holder

__all__ = ["server_memory"]


def server_memory(holder: Holder) -> dict[str, int]:
    """Returns the bytes of a server's tensors, each piece of memory counted once.

    parameters   of its share, and the copies that a lingering release made necessary
    optimizer    its state, which is there from the first update on
    receive      where pushes arrive: one gradient, as it travels, for each worker, and its running statistics
    decoded      what compressed gradients are read into, one for each worker
    statistics   each worker's running statistics
    correction   what mends stale gradients
    """
    replica, slots, correction = holder.replica, holder.slots, holder.correction
    arriving = [tensor for slot in slots for tensor in slot.packet.parts.tensors]
    state = [v for s in replica.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return {
        "parameters": _nbytes([*replica.params.storages, *holder.lingering]),
        "optimizer": _nbytes(state),
        "receive": _nbytes(arriving),
        "decoded": _nbytes([s for slot in slots for s in slot.gradients.storages], arriving),
        "statistics": _nbytes([s for slot in slots for s in slot.buffers.storages]),
        "correction": correction.nbytes if correction else 0,
    }


def _nbytes(tensors: Iterable[Tensor], known: Iterable[Tensor] = ()) -> int:
    """Returns the bytes of the memory behind `tensors` that is not behind `known` tensors, too."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in known}
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
