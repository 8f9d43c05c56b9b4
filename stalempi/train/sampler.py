"""Decides which samples a worker takes in an epoch, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from stalempi.context import current
from stalempi.errors import ConfigError

__all__ = ["DistributedSampler"]

Order = npt.NDArray[np.int64]


class DistributedSampler(Sampler[int]):
    """Deals the samples of each epoch to the workers: each sample to exactly one, sizes differing by at most one.

    One shuffled order per epoch, from `seed` and the epoch alone, is dealt like cards: worker r of n takes places
    r, r + n, r + 2n, ... So the b-th batches of n workers together are one process's b-th batch, n times as large.

    Each `iter` runs the next epoch; `set_epoch` is there for those who call it, and not needed. A loaded state goes on
    in the middle of its epoch. A new `iter` ends the one before.
    """

    def __init__(
        self,
        data_source: Sized | int,
        *,
        num_workers: int | None = None,
        worker_rank: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Samples from `data_source` (or that many samples); worker and number of workers default to this rank's.

        Here each rank that computes counts as a worker, also one of a group: every one has a shard of its own.

        Raises ConfigError if there are fewer samples than workers, or if a value is out of range.
        """
        self.size = data_source if isinstance(data_source, int) else len(data_source)
        if num_workers is None:
            num_workers = current().num_shards
        if worker_rank is None:
            worker_rank = current().shard_rank
        if worker_rank is None:
            raise ConfigError(
                f"this rank is the {current().role} and takes no samples: make samplers on workers only, "
                "and under Allreduce after the optimizer"
            )
        _check_worker(num_workers, worker_rank)
        if self.size < num_workers:
            raise ConfigError(f"{self.size} samples are too few for {num_workers} workers: start fewer workers")
        if seed < 0:
            raise ConfigError(f"seed={seed} is negative: give 0 or more, the same on every worker")
        self.num_workers, self.worker_rank, self.seed, self.shuffle = num_workers, worker_rank, seed, shuffle
        self._next_workers = num_workers, worker_rank
        self._started = False
        self._runs = 0
        self._enter(epoch=0)

    def __len__(self) -> int:
        """Samples of this worker in the current epoch; those of before a `reshard` in its middle do not count."""
        return len(self._shard)

    def __iter__(self) -> Iterator[int]:
        if self._started:
            self.num_workers, self.worker_rank = self._next_workers
            self._enter(epoch=self.epoch + 1)
        self._started = True
        self._runs += 1
        return self._draw(self._runs)

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the one that the next `iter` runs; a loaded position in that epoch is kept."""
        if epoch < 0:
            raise ConfigError(f"epoch={epoch} is negative")
        if self._started or epoch != self.epoch:
            self.num_workers, self.worker_rank = self._next_workers
            self._started = False
            self._enter(epoch)

    def reshard(self, num_workers: int, worker_rank: int, *, positions: Sequence[int] | None = None) -> None:
        """Deals to `num_workers` workers from now on, of which this one is `worker_rank`.

        From the next epoch on, or at once where `positions` tells how many samples each of the old workers has taken
        in this epoch: what is left is dealt anew, also to an `iter` that is running. Then all must call it with the
        same positions. A DataLoader with worker processes draws ahead, so for that call it between two of its epochs.

        Raises ConfigError, and changes nothing, if the positions cannot be.
        """
        _check_worker(num_workers, worker_rank)
        if self.size < num_workers:
            raise ConfigError(f"{self.size} samples are too few for {num_workers} workers")
        dealt = self._dealt
        if positions is not None:
            dealt = (*dealt, self._check_positions(positions))
        elif self._started or self.position:
            self._next_workers = num_workers, worker_rank
            return
        self.num_workers, self.worker_rank = self._next_workers = num_workers, worker_rank
        self._enter(self.epoch, dealt=dealt)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, seed and position as plain numbers and lists; after an epoch's last sample, the start of the next."""
        state = {"size": self.size, "seed": self.seed, "num_workers": self.num_workers}
        if self.position == len(self) and self._started:
            return state | {"num_workers": self._next_workers[0], "epoch": self.epoch + 1, "position": 0, "dealt": []}
        return state | {"epoch": self.epoch, "position": self.position, "dealt": [list(deal) for deal in self._dealt]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; the next `iter` runs the rest of its epoch.

        Raises ConfigError, and changes nothing, if it belongs to another data set or number of workers.
        """
        if state["size"] != self.size:
            raise ConfigError(
                f"the state is of {state['size']} samples, the data set has {self.size}: use the same data"
            )
        if state["num_workers"] != self.num_workers:
            raise ConfigError(
                f"the state is of {state['num_workers']} workers, now there are {self.num_workers}: "
                "give the states of all old workers to load_state_dicts"
            )
        self._load(state, dealt=_as_tuples(state["dealt"]), position=state["position"])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Goes on from the states of all old workers, in the order of their ranks, with any number of new ones.

        With the same number each goes on with its own. Otherwise what is left of the least epoch is dealt anew; what
        faster workers had already taken of later epochs is taken again when its turn comes.
        """
        if len(states) == self.num_workers:
            self.load_state_dict(states[self.worker_rank])
            return
        if not states or {(state["size"], state["num_workers"]) for state in states} != {(self.size, len(states))}:
            raise ConfigError(f"the {len(states)} states do not belong together or not to {self.size} samples")
        least = min(states, key=lambda state: int(state["epoch"]))
        dealt = _as_tuples(least["dealt"])
        left = _order(self.size, (least["seed"], least["epoch"]), dealt=dealt, shuffle=self.shuffle)
        positions = tuple(
            int(state["position"]) if state["epoch"] == least["epoch"] else len(left[worker :: len(states)])
            for worker, state in enumerate(states)
        )
        self._load(least, dealt=(*dealt, positions), position=0)

    def _load(self, state: dict[str, Any], *, dealt: tuple[tuple[int, ...], ...], position: int) -> None:
        self.seed = int(state["seed"])
        self._started = False
        self._runs += 1
        self._enter(int(state["epoch"]), dealt=dealt, position=position)

    def _enter(self, epoch: int, *, dealt: tuple[tuple[int, ...], ...] = (), position: int = 0) -> None:
        self.epoch, self.position, self._dealt = epoch, position, dealt
        order = _order(self.size, (self.seed, epoch), dealt=dealt, shuffle=self.shuffle)
        self._left = len(order)
        self._shard = order[self.worker_rank :: self.num_workers]

    def _draw(self, run: int) -> Iterator[int]:
        while run == self._runs and self.position < len(self._shard):
            self.position += 1
            yield int(self._shard[self.position - 1])

    def _check_positions(self, positions: Sequence[int]) -> tuple[int, ...]:
        sizes = [len(range(worker, self._left, self.num_workers)) for worker in range(self.num_workers)]
        fits = len(positions) == len(sizes) and all(0 <= p <= size for p, size in zip(positions, sizes, strict=True))
        if not fits:
            raise ConfigError(f"positions {list(positions)} do not fit the shards of the old workers, {sizes} samples")
        return tuple(map(int, positions))


def _check_worker(num_workers: int, worker_rank: int) -> None:
    if num_workers < 1 or not 0 <= worker_rank < num_workers:
        raise ConfigError(f"worker_rank={worker_rank} of num_workers={num_workers}: ranks go from 0 to num_workers - 1")


def _as_tuples(dealt: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, positions)) for positions in dealt)


def _order(size: int, key: tuple[int, int], *, dealt: tuple[tuple[int, ...], ...], shuffle: bool) -> Order:
    """Orders the samples of the epoch `key` = (seed, epoch), less those taken under each earlier deal."""
    order = np.random.default_rng(key).permutation(size) if shuffle else np.arange(size)
    for positions in dealt:
        nth, worker = np.divmod(np.arange(len(order)), len(positions))
        order = order[nth >= np.asarray(positions)[worker]]
    return order
