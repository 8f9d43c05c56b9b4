"""Says from where a worker's pushes are sent, and where its releases arrive."""

from __future__ import annotations

import torch

from stalempi.flat import Flat
from stalempi.replica import Replica

__all__ = ["Places"]


class Places:
    """The memory of a worker's messages.

    A worker that waits for each release sends its gradients and running statistics from where they lie, and receives
    parameters into its model. One that runs ahead computes while its messages are on their way, so it keeps these
    apart, for one more copy of gradients, running statistics and parameters.

    Args:
        replica: the worker's model.
        gradients: its gradients.
        apart: whether it runs ahead.

    Attributes:
        gradients, buffers: what a push carries.
        params: where a release arrives.
    """

    def __init__(self, replica: Replica, gradients: Flat, *, apart: bool) -> None:
        self._pairs_out = [(gradients, gradients), (replica.buffers, replica.buffers)]
        self._pair_in = (replica.params, replica.params)
        if apart:
            self._pairs_out = [(gradients, gradients.like()), (replica.buffers, replica.buffers.like())]
            self._pair_in = (replica.params.like(), replica.params)
        self.gradients, self.buffers = (place for _, place in self._pairs_out)
        self.params = self._pair_in[0]

    def fill(self) -> None:
        """Makes what is pushed what the worker has now; nothing of the last push is on its way."""
        for source, place in self._pairs_out:
            _copy(source, place)

    def take_in(self) -> None:
        """Makes the model's parameters those of the release that has arrived."""
        _copy(*self._pair_in)


@torch.no_grad()
def _copy(source: Flat, target: Flat) -> None:
    if source is not target:
        for a, b in zip(source.storages, target.storages, strict=True):
            b.copy_(a)
