"""A policy that was written down as plain values and read again decides as the one that was not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalempi.errors import ConfigError
from stalempi.policy import BSP, DSSP, SSP, Decision, Event, Leave, Policy, Push, make_policy

from .referee import Referee
from .test_properties import next_event, policies

# Sums of these seconds are exact, so that ages give back the very moments.
choices = st.tuples(st.integers(0, 10**6), st.sampled_from([0.0, 0.015625, 1.0, 1.125, 7.0]), st.integers(0, 15))


def feed(policy: Policy, event: Event) -> list[Decision]:
    return policy.on_push(event) if isinstance(event, Push) else policy.on_leave(event)


def same_kind(policy: Policy) -> Policy:
    options: dict[str, object] = dict(policy.options())
    if "narrow" in options:
        options["narrow"] = tuple(int(word) for word in str(options["narrow"]).split(":"))
    return make_policy(policy.name, **options)


@settings(max_examples=300, deadline=None)
@given(
    policy=policies,
    num_workers=st.integers(3, 6),
    history=st.lists(choices, min_size=1, max_size=100),
    cut=st.integers(0, 100),
)
def test_a_state_goes_through_json_at_any_moment(
    policy: Policy, num_workers: int, history: list[tuple[int, float, int]], cut: int
) -> None:
    referee = Referee(num_workers, policy.bound, drops=isinstance(policy, BSP))
    referee.start(policy.start(num_workers, 0.0))
    other: Policy | None = None
    now = 0.0
    for place, choice in enumerate(history):
        if not referee.members:
            break
        if place == cut % len(history):
            other = same_kind(policy)
            other.start(num_workers, now)
            other.load_state(json.loads(json.dumps(policy.state(now))), now)
        event = next_event(referee, now, choice)
        now = event.now
        decisions = feed(policy, event)
        referee.see(event, decisions)
        if other is not None:
            assert feed(other, event) == decisions


@pytest.mark.parametrize("controller", ["dyn", "moment", "paper-capped"])
def test_what_was_learned_goes_on_by_another_clock(controller: str) -> None:
    policy = DSSP(0, 8, controller=controller)
    policy.start(2, 0.0)
    for step in range(1, 40):
        for worker, now in ((0, 3.0 * step), (1, 3.0 * step + (9.0 if step % 10 == 0 else 1.0))):
            if policy.is_running(worker):
                policy.on_push(Push(worker, now))
    other = DSSP(0, 8, controller=controller)
    other.start(2, 1024.0)
    learned = policy.state(128.0)
    assert learned["controller"] != other.state(1024.0)["controller"]
    other.load_state(learned, 1024.0)
    assert other.state(1024.0) == learned


def test_a_state_of_other_workers_is_refused() -> None:
    policy, other = SSP(2), SSP(2)
    policy.start(3, 0.0)
    other.start(2, 0.0)
    other.on_leave(Leave(0, 1.0))
    before = other.state(1.0)
    with pytest.raises(ConfigError, match="of 3 workers, this run has 2"):
        other.load_state(policy.state(0.0), 0.0)
    assert other.state(1.0) == before
