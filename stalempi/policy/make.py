"""Makes a policy from the words of a command line."""

from __future__ import annotations

import inspect

from stalempi.errors import ConfigError
from stalempi.policy.allreduce import Allreduce
from stalempi.policy.asp import ASP
from stalempi.policy.base import Policy
from stalempi.policy.bsp import BSP
from stalempi.policy.cached import CachedSSP
from stalempi.policy.dssp import DSSP
from stalempi.policy.ssp import SSP

__all__ = ["POLICIES", "make_policy"]

POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (BSP, ASP, SSP, CachedSSP, DSSP, Allreduce)}


def make_policy(name: str, **options: object) -> Policy:
    """Returns the policy called `name`, made with `options` (see its class).

    Raises ConfigError for an unknown name, an option that this policy does not take, one that it needs and lacks, or
    a value that it cannot use.
    """
    kind = POLICIES.get(name)
    if kind is None:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    takes = inspect.signature(kind).parameters
    unknown = sorted(set(options) - set(takes))
    if unknown:
        known = f"it takes {', '.join(takes)}" if takes else "it takes none"
        raise ConfigError(f"policy {name} has no option {unknown[0]}; {known}")
    missing = [key for key, value in takes.items() if value.default is value.empty and key not in options]
    if missing:
        raise ConfigError(f"policy {name} needs {' and '.join(missing)}")
    return kind(**options)
