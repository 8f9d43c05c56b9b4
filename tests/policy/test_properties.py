"""Random groups of up to 12 workers, random policies, random histories: the laws hold after every event."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalempi.errors import ProtocolError
from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Event, Leave, Policy, Push

from .referee import Referee

ranges = st.tuples(st.integers(0, 3), st.integers(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1]))
narrowings = st.none() | st.tuples(st.integers(0, 20), st.integers(0, 40)).map(lambda pair: (pair[0], sum(pair)))
predicting = st.builds(
    lambda limits, controller, predictor, eps, narrow: DSSP(
        *limits, controller=controller, predictor=predictor, eps=eps, narrow=narrow
    ),
    ranges,
    st.sampled_from(["dyn", "moment"]),
    st.sampled_from(["last", "ema", "mean-std:2"]),
    st.sampled_from([0.0, 0.01, 0.5, 10.0]),
    narrowings,
)
capped = st.builds(lambda limits, narrow: DSSP(*limits, controller="paper-capped", narrow=narrow), ranges, narrowings)
policies = st.one_of(
    st.builds(BSP, backup=st.integers(0, 2)),
    st.builds(ASP),
    st.builds(SSP, st.integers(0, 5)),
    st.builds(CachedSSP, st.integers(0, 5)),
    predicting,
    capped,
)
# A choice among the workers that could move, the wait before it (s), and whether it leaves (at 0) or pushes.
choices = st.tuples(st.integers(0, 10**6), st.sampled_from([0.0, 0.01, 1.0, 1.1, 7.0]), st.integers(0, 15))


def next_event(referee: Referee, now: float, choice: tuple[int, float, int]) -> Event:
    which, wait, leave = choice
    if leave == 0:
        members = sorted(referee.members)
        return Leave(members[which % len(members)], now + wait)
    running = sorted(referee.running)
    return Push(running[which % len(running)], now + wait)


@settings(max_examples=300, deadline=None)
@given(policy=policies, num_workers=st.integers(3, 12), history=st.lists(choices, max_size=120))
def test_the_laws_hold_at_every_state(policy: Policy, num_workers: int, history: list[tuple[int, float, int]]) -> None:
    referee = Referee(num_workers, policy.bound, drops=isinstance(policy, BSP))
    referee.start(policy.start(num_workers, 0.0))
    now = 0.0
    for choice in history:
        if not referee.members:
            break
        event = next_event(referee, now, choice)
        now = event.now
        referee.see(event, policy.on_push(event) if isinstance(event, Push) else policy.on_leave(event))
        assert all(policy.is_running(worker) == (worker in referee.running) for worker in range(num_workers))
    for worker in sorted(referee.members):
        referee.see(Leave(worker, now), policy.on_leave(Leave(worker, now)))
    referee.finish()


@settings(max_examples=100, deadline=None)
@given(policy=policies, history=st.lists(choices, max_size=40), worker=st.integers(-1, 6), push=st.booleans())
def test_an_illegal_event_raises_and_changes_nothing(
    policy: Policy, history: list[tuple[int, float, int]], worker: int, push: bool
) -> None:
    referee = Referee(5, policy.bound, drops=isinstance(policy, BSP))
    referee.start(policy.start(5, 0.0))
    now = 0.0
    for choice in history:
        if len(referee.members) < 2:
            break
        event = next_event(referee, now, choice)
        now = event.now
        referee.see(event, policy.on_push(event) if isinstance(event, Push) else policy.on_leave(event))
    if worker in (referee.running if push else referee.members):
        return
    before = pickle.dumps(policy)
    with pytest.raises(ProtocolError):
        policy.on_push(Push(worker, now)) if push else policy.on_leave(Leave(worker, now))
    assert pickle.dumps(policy) == before
