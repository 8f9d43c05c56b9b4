"""Says which server holds which parameters."""

from __future__ import annotations

from collections.abc import Sequence

from stalempi.errors import ConfigError
from stalempi.policy import CachedSSP, Policy

__all__ = ["check_servers", "share_out"]


def check_servers(policy: Policy, servers: int, *, clip_norm: float | None = None) -> None:
    """Raises ConfigError where several servers do not do."""
    if servers < 2:
        return
    if not policy.has_server:
        raise ConfigError(f"servers={servers}: under {policy} there is none")
    if clip_norm is not None:
        raise ConfigError(f"servers={servers}: no server sees a whole norm; clip by value, or on the worker")
    if isinstance(policy, CachedSSP):
        raise ConfigError(f"servers={servers}: under {policy} a worker steps as the one server does; take plain ssp")


def share_out(sizes: Sequence[int], servers: int) -> list[int]:
    """Returns the server of each parameter, so that all hold about as many bytes: the largest first, to the lightest.

    Parameters are not divided, since an optimizer's step on a part of one is not always a part of its step.

    Args:
        sizes: bytes of each parameter.
        servers: how many there are.

    Raises ConfigError if there are fewer parameters than servers.
    """
    if len(sizes) < servers:
        raise ConfigError(
            f"{servers} servers share {len(sizes)} parameter(s), which are not divided: take fewer servers"
        )
    loads, found = [0] * servers, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        lightest = min(range(servers), key=lambda server: (loads[server], server))
        found[place] = lightest
        loads[lightest] += max(1, sizes[place])
    return found
