"""Names the scenarios that policies are compared in: who is slow, when, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from stalempi.errors import ConfigError
from stalempi.simulate.workload import Loss, Workload, streams

__all__ = ["SCENARIOS", "Scenario", "find_scenario"]


@dataclass(frozen=True)
class Scenario:
    """Compute times of a group of workers, in units of the mean time of an undisturbed iteration.

    Attributes:
        name, summary: for people.
        num_workers: where the caller has no wish.
        speeds: times per iteration of the workers, cyclically: 2 is half as fast.
        straggler: how many times slower the last worker is.
        jitter: standard deviation of every iteration (normal, never below 0.1).
        stalls, stall: share of the iterations that stall, and how many times longer those take.
        turn, slow: the workers take turns of `turn` units, in which one of them is `slow` times slower.
        dies: whether worker 1 dies, a third into the run; it is noticed 10 units later.
    """

    name: str
    summary: str
    num_workers: int = 4
    speeds: tuple[float, ...] = (1.0,)
    straggler: float = 1.0
    jitter: float = 0.1
    stalls: float = 0.0
    stall: float = 6.0
    turn: float = 0.0
    slow: float = 2.0
    dies: bool = False

    def workload(self, num_workers: int | None = None, *, seed: int, horizon: float, unit: float = 1.0) -> Workload:
        """Returns the workload of one run.

        Args:
            num_workers: None for the scenario's own number.
            seed: each worker draws from a stream of its own, so its k-th iteration has the same jitter and the same
                stall under every policy.
            horizon: seconds that the run will take, about; only for `dies`.
            unit: seconds of an undisturbed iteration.
        """
        number = self.num_workers if num_workers is None else num_workers
        least = 2 if self.dies else 1
        if number < least:
            raise ConfigError(f"scenario {self.name} needs at least {least} worker(s), got {number}")
        if not unit > 0:
            raise ConfigError(f"an iteration must take more than 0 s, got {unit:g}")
        draws = streams(number, seed)
        speeds = [unit * self.speeds[worker % len(self.speeds)] for worker in range(number)]
        speeds[-1] *= self.straggler
        turn = self.turn * unit

        def compute(worker: int, now: float) -> float:
            draw = draws[worker]
            seconds = speeds[worker]
            if self.jitter:
                seconds *= max(0.1, draw.gauss(1.0, self.jitter))
            if self.stalls and draw.random() < self.stalls:
                seconds *= self.stall
            if turn and int(now / turn) % number == worker:
                seconds *= self.slow
            return seconds

        losses = (Loss(1, horizon / 3, horizon / 3 + 10 * unit),) if self.dies else ()
        return Workload(number, compute, losses)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("homogeneous", "all alike, to the last digit", jitter=0.0),
        Scenario("jitter", "all alike, every iteration varies by 10%"),
        Scenario("stalls", "3% of the iterations take six times as long", stalls=0.03),
        Scenario("rotating", "one worker after the other is half as fast for 40 iterations", turn=40.0),
        Scenario("straggler", "the last worker is three times slower for good", straggler=3.0),
        Scenario("pair", "the paper's two workers, 1 : 1.9 for good", num_workers=2, speeds=(1.0, 1.9)),
        Scenario("mixed", "four kinds of worker, 1 : 1.2 : 1.5 : 2 for good", speeds=(1.0, 1.2, 1.5, 2.0)),
        Scenario("dies", "stalls, and worker 1 dies a third into the run", stalls=0.03, dies=True),
    )
}


def find_scenario(name: str | None) -> Scenario:
    """Returns the scenario called `name`, stalls by default; ConfigError lists them."""
    name = name or "stalls"
    if name not in SCENARIOS:
        raise ConfigError(f"scenario must be one of {', '.join(SCENARIOS)}, got {name!r}")
    return SCENARIOS[name]
