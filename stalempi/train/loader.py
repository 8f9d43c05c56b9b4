"""Makes batches from a data set and a sampler, with or without processes, in a way that is safe under MPI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch import Tensor
from torch.utils.data import Dataset, Sampler, SequentialSampler, default_collate

from stalempi.errors import ConfigError
from stalempi.train.images import TensorImages
from stalempi.train.sampler import DistributedSampler

__all__ = ["DataLoader"]

# Between the seeds of two epochs, from each of which loader processes count up.
_EPOCH_STRIDE = 1_000_003


class _Order(NamedTuple):
    """One batch to fetch, and the sampler's state once it has been delivered."""

    epoch: int | None
    indices: list[int]
    state: dict[str, Any] | None


class _Batches(Sampler[_Order]):
    def __init__(self, sampler: Sampler[int], batch_size: int, *, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __len__(self) -> int:
        assert isinstance(self.sampler, Sized)
        return (len(self.sampler) + (0 if self.drop_last else self.batch_size - 1)) // self.batch_size

    def __iter__(self) -> Iterator[_Order]:
        drawn = iter(self.sampler)
        distributed = self.sampler if isinstance(self.sampler, DistributedSampler) else None
        epoch = distributed.epoch if distributed else None
        while indices := list(islice(drawn, self.batch_size)):
            if len(indices) == self.batch_size or not self.drop_last:
                yield _Order(epoch, indices, distributed.state_dict() if distributed else None)


class _Fetch(Dataset[Any]):
    """Answers an order with its batch; this object travels to the worker processes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, order: _Order) -> tuple[Any, dict[str, Any] | None]:
        if hasattr(self.dataset, "batch"):
            return self.dataset.batch(order.indices, epoch=order.epoch), order.state
        return default_collate([self.dataset[index] for index in order.indices]), order.state


def _as_is(fetched: Any) -> Any:
    return fetched


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A torch DataLoader that fetches by the batch, knows how far it has come, and never forks.

    Forking after MPI_Init is unsafe: the child shares the network card's memory and locks. So processes come from a
    fork server, or are spawned. Either way Python imports the main script again in each of them, so the script's work
    must stand under `if __name__ == "__main__":`. Data in memory needs no processes and gets none.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        sampler: Sampler[int] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        **torch_options: Any,
    ) -> None:
        """Loads batches of `batch_size` samples of a map-style data set, in its order where no sampler is given.

        `num_workers` counts processes of this rank (not the workers of the job). `torch_options` go to torch's
        DataLoader: pin_memory, prefetch_factor, persistent_workers, timeout, and multiprocessing_context as the name of
        a start method, "forkserver" (default) or "spawn".

        Raises ConfigError for another start method, a size below 1, or a batch larger than this worker's shard.
        """
        method = torch_options.pop("multiprocessing_context", None) or "forkserver"
        if method not in ("forkserver", "spawn"):
            raise ConfigError(
                f"start method {method!r} for loader processes is unsafe under MPI: use 'forkserver' or 'spawn'"
            )
        if batch_size < 1 or num_workers < 0:
            raise ConfigError(f"batch_size={batch_size} and num_workers={num_workers}: give at least 1 and 0")
        if isinstance(sampler, DistributedSampler) and batch_size > len(sampler):
            raise ConfigError(
                f"batch_size={batch_size} is larger than a worker's shard of {len(sampler)} samples: "
                "make the batch smaller or start fewer workers"
            )
        if isinstance(dataset, TensorImages) or num_workers == 0:
            num_workers = 0
            for needs_processes in ("prefetch_factor", "persistent_workers", "timeout"):
                torch_options.pop(needs_processes, None)
        self.samples = sampler if sampler is not None else SequentialSampler(dataset)
        self._delivered: dict[str, Any] | None = None
        self._seeded = isinstance(sampler, DistributedSampler) and "generator" not in torch_options
        if self._seeded:
            torch_options["generator"] = torch.Generator()
        super().__init__(
            _Fetch(dataset),
            batch_size=None,
            sampler=_Batches(self.samples, batch_size, drop_last=drop_last),
            collate_fn=_as_is,
            num_workers=num_workers,
            multiprocessing_context=method if num_workers else None,
            **torch_options,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]  # torch names its own class
        if (
            self._seeded
        ):  # by epoch, so that a resumed run takes nothing else from torch's generator than an unbroken one
            epoch = self.state_dict()["epoch"]
            self.generator.manual_seed((torch.initial_seed() + _EPOCH_STRIDE * epoch) % 2**63)
        for batch, state in super().__iter__():
            # without processes nothing is fetched ahead, and the sampler itself knows best
            self._delivered = state if self.num_workers else None
            yield batch
        self._delivered = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the sampler's state after the last batch that was handed out, whatever has been fetched ahead."""
        return self._delivered or self._distributed().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the batch at which `state` was taken."""
        self._distributed().load_state_dict(state)
        self._delivered = None

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Goes on from the states of all workers of an earlier run, see `DistributedSampler.load_state_dicts`."""
        self._distributed().load_state_dicts(states)
        self._delivered = None

    def _distributed(self) -> DistributedSampler:
        if not isinstance(self.samples, DistributedSampler):
            raise ConfigError("only a loader with a DistributedSampler has a state: give it one as `sampler`")
        return self.samples
