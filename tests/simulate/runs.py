"""Makes short runs for tests: events with their decisions, under any policy."""

from __future__ import annotations

from collections.abc import Callable

from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Decision, Event, Policy
from stalempi.simulate.network import Network
from stalempi.simulate.scenarios import find_scenario
from stalempi.simulate.timing import Limit, simulate
from stalempi.simulate.workload import Workload, listed
from stalempi.stats import RunStats
from stalempi.trace import Record, Start, Trace

CAPPED: dict[str, Callable[[], Policy]] = {
    "bsp": BSP,
    "ssp-0": lambda: SSP(0),
    "ssp-3": lambda: SSP(3),
    "cached": lambda: CachedSSP(2),
    "dyn": lambda: DSSP(1, 5),
    "moment": lambda: DSSP(1, 5, controller="moment"),
    "paper-capped": lambda: DSSP(1, 5, controller="paper-capped"),
}
POLICIES: dict[str, Callable[[], Policy]] = CAPPED | {"asp": ASP, "backup": lambda: BSP(backup=1)}

NETWORK = Network(latency=0.01, bandwidth=1e6, push_bytes=20_000, release_bytes=10_000, service=0.005)


class Watch:
    """Collects what the server would let an observer see."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.records: list[Record] = []

    def __call__(self, event: Event, decisions: list[Decision]) -> None:
        self.records.append(Record(event, self.policy.clocks.gap(event.worker), tuple(decisions)))


def traced(
    policy: Policy, workload: Workload, *, limit: Limit | None = None, network: Network | None = None
) -> tuple[RunStats, Trace]:
    """Runs `policy` and returns its figures and its trace."""
    watch = Watch(policy)
    stats = simulate(policy, workload, limit=limit or Limit(pushes=200), network=network, observe=watch)
    return stats, Trace(Start.of(policy, 0.0), watch.records)


def stalls(num_workers: int = 4, *, seed: int = 0) -> Workload:
    """Returns the scenario in which some iterations take six times as long."""
    return find_scenario("stalls").workload(num_workers, seed=seed, horizon=100.0)


def steady(*seconds: float) -> Workload:
    """Returns a workload in which every worker always takes the same time."""
    return listed([[one] for one in seconds])
