"""Says from where a worker's pushes are sent, and where its releases arrive."""

from __future__ import annotations

import torch

from stalempi.flat import Flat
from stalempi.replica import Replica

__all__ = ["Places"]


class Places:
    """The memory of a worker's messages.

    A worker that waits for each release sends its gradients and running statistics from where they lie, if they are not
    compressed, and receives parameters into its model. One that runs ahead computes while its messages are on their
    way, so it keeps these apart, for one more copy of gradients, running statistics and parameters.

    Args:
        replica: the worker's model.
        gradients: its gradients.
        apart: whether it runs ahead.

    Attributes:
        wire: the form in which a push carries the gradients.
        buffers: the running statistics that a push carries.
        params: where a release arrives.
    """

    def __init__(self, replica: Replica, gradients: Flat, *, apart: bool) -> None:
        self._replica = replica
        self.wire = replica.wire(gradients, apart=apart)
        self.buffers = replica.buffers.like() if apart else replica.buffers
        self.params = replica.params.like() if apart else replica.params

    def fill(self) -> None:
        """Makes the running statistics that are pushed those of now; nothing of the last push is on its way."""
        _copy(self._replica.buffers, self.buffers)

    def take_in(self) -> None:
        """Makes the model's parameters those of the release that has arrived."""
        _copy(self.params, self._replica.params)


def _copy(source: Flat, target: Flat) -> None:
    if source is target:
        return
    with torch.no_grad():
        for a, b in zip(source.storages, target.storages, strict=True):
            b.copy_(a)
