"""Keeps the versions of a block's weights that batches inside it still need (weight stashing)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["Weights"]


class Weights:
    """The weights of a block, by version: how many updates they have seen.

    Args:
        parameters: the live ones, by name.
        stash: whether old versions are kept; without it every version is the live one.
        two: PipeDream-2BW: a batch uses the weights before the update that the batch before it makes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, stash: bool, two: bool = False) -> None:
        self.parameters = dict(parameters)
        self._stash, self._two = stash, two
        self._pins: Counter[int] = Counter()
        self._versions: dict[int, dict[str, Tensor]] = {}
        self.version = self._floor = 0
        self.most_kept = 0
        self.restart(0)

    def restart(self, version: int) -> None:
        """Begins anew at `version`, with no batch inside."""
        assert not +self._pins, "a batch inside needs its weights"
        self.version = self._floor = version
        self._versions.clear()
        if self._two:
            self._keep(version)

    def pin(self, batch: int) -> int:
        """Returns the version that a batch is to use, which stays until `unpin`."""
        version = max(self._floor, batch - 1) if self._two else self.version
        if self._stash:
            self._keep(version)
            self._pins[version] += 1
        return version

    def of(self, version: int) -> Mapping[str, Tensor]:
        """Returns the weights of a pinned version, by name; the live ones if nothing is stashed."""
        return self._versions[version] if self._stash else self.parameters

    def unpin(self, version: int) -> None:
        """Says that a batch is done with a version."""
        if self._stash:
            self._pins[version] -= 1
            self._forget()

    def updated(self) -> None:
        """Counts an update of the live weights."""
        self.version += 1
        if self._two:
            self._forget()
            self._keep(self.version)

    def _keep(self, version: int) -> None:
        if version not in self._versions:
            assert version == self.version, "only the live weights can be copied"
            copies = {name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()}
            self._versions[version] = copies
            self.most_kept = max(self.most_kept, len(self._versions))

    def _forget(self) -> None:
        oldest = self.version - 1 if self._two else self.version + 1
        for version in [v for v in self._versions if v < oldest and self._pins[v] == 0]:
            del self._versions[version], self._pins[version]
