"""Opens the queues of one block: to its neighbours, to the copies of it, to whoever else it speaks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stalempi.errors import ConfigError
from stalempi.pipeline.build import Ends, Shared
from stalempi.pipeline.dryrun import link_depths
from stalempi.pipeline.link import Lane, Links, Receiver, Sender
from stalempi.pipeline.replicas import Replicas
from stalempi.pipeline.runner import Neighbour
from stalempi.pipeline.schedules import Schedule
from stalempi.pipeline.split import Tie

__all__ = ["Wiring"]


@dataclass(frozen=True)
class Wiring:
    """Where one block is, and how it reaches others.

    Attributes:
        links: of this rank.
        block, blocks: this block, and how many there are.
        replica, replicas: which copy of the pipeline, and how many there are; block k of copy r is on rank r K + k.
        device: where this rank computes.
        timeout: seconds of silence that end the job.
    """

    links: Links
    block: int
    blocks: int
    replica: int
    replicas: int
    device: torch.device
    timeout: float

    def rank(self, block: int) -> int:
        """Returns the rank of a block of this copy."""
        return self.replica * self.blocks + block

    @property
    def is_first(self) -> bool:
        """Whether this block takes the data in."""
        return self.block == 0

    @property
    def is_last(self) -> bool:
        """Whether this block computes the loss."""
        return self.block == self.blocks - 1

    def ends(self, schedule: Schedule, ties: Sequence[Tie], *, send_labels: bool, copies: Replicas | None) -> Ends:
        """Opens what training needs; ConfigError where parameters are shared in a way that cannot be trained."""
        depths = link_depths(schedule, self.blocks)
        found = Ends(agree=copies.average if copies else None)
        if not self.is_first:
            up, down = depths[self.block - 1]
            found = replace(found, below=self._neighbour(self.block - 1, Lane.GRADIENT, down, Lane.ACTIVATION, up))
        if not self.is_last:
            up, down = depths[self.block]
            found = replace(found, above=self._neighbour(self.block + 1, Lane.ACTIVATION, up, Lane.GRADIENT, down))
        if send_labels and self.blocks > 1:
            depth = (1 + sum(up for up, _ in depths)) * schedule.micro_batches
            if self.is_first:
                found = replace(found, labels_out=self.sender(self.blocks - 1, Lane.LABEL, depth))
            if self.is_last:
                found = replace(found, labels=self.receiver(0, Lane.LABEL, depth))
        return self._tied(found, Shared.of(ties), schedule)

    def _tied(self, ends: Ends, shared: Shared | None, schedule: Schedule) -> Ends:
        if shared and self.replicas > 1:
            raise ConfigError(f"{shared.lower_names[0]} is shared by two blocks: that cannot be had with replicas")
        if not shared or self.block not in (shared.lower, shared.upper):
            return ends
        other = shared.upper if self.block == shared.lower else shared.lower
        depth = 2 + shared.lag(schedule, self.blocks)
        link = self._neighbour(other, Lane.TIE, depth, Lane.TIE, depth)
        return replace(ends, tie=shared.options(self.block, link, schedule, self.blocks))

    def copies(self, start: Sequence[Tensor]) -> Replicas | None:
        """Joins the copies of this block, all of which then have the values `start` of the first; None if it is one."""
        if self.replicas == 1:
            return None
        ranks = range(self.block, self.replicas * self.blocks, self.blocks)
        mine = self.rank(self.block)
        found = Replicas(self.links, ranks, mine, timeout=self.timeout, device=self.device)
        found.share_start(start)
        return found

    def for_evaluation(self) -> tuple[Receiver | None, Sender | None]:
        """Opens what one evaluation needs: where inputs come from, where outputs go."""
        below = None if self.is_first else self.receiver(self.block - 1, Lane.EVALUATION, 1)
        above = None if self.is_last else self.sender(self.block + 1, Lane.EVALUATION, 2)
        return below, above

    def sender(self, block: int, lane: Lane, depth: int) -> Sender:
        """Opens a queue to another block."""
        return self.links.sender(self.rank(block), lane, depth, timeout=self.timeout)

    def receiver(self, block: int, lane: Lane, depth: int, *, device: torch.device | None = None) -> Receiver:
        """Opens a queue from another block; what arrives is put on `device`, this block's own by default."""
        place = device or self.device
        return self.links.receiver(self.rank(block), lane, depth, timeout=self.timeout, device=place)

    def _neighbour(self, block: int, out: Lane, out_depth: int, back: Lane, back_depth: int) -> Neighbour:
        return Neighbour(sends=self.sender(block, out, out_depth), receives=self.receiver(block, back, back_depth))
