"""Every rank has one role, and ranks that do not fit are refused with the numbers that would."""

from __future__ import annotations

import pytest

from stalempi.errors import ConfigError
from stalempi.roles import assign_role


def test_ranks_are_a_server_and_workers_by_default() -> None:
    roles = [assign_role(rank, 4) for rank in range(4)]
    assert [str(role) for role in roles] == ["server", "worker 0", "worker 1", "worker 2"]
    assert [role.shard_rank for role in roles] == [None, 0, 1, 2]
    assert list(roles[0].takes_from) == [1, 2, 3]
    assert [role.pushes_to for role in roles[1:]] == [0, 0, 0]


def test_groups_have_leaders_and_every_computing_rank_a_shard() -> None:
    roles = [assign_role(rank, 8, group=3, evaluator=True) for rank in range(8)]
    assert [str(role) for role in roles[3:5]] == ["worker 0, member 2", "worker 1, member 0"]
    assert [role.worker_rank for role in roles] == [None, 0, 0, 0, 1, 1, 1, None]
    assert [role.group_rank for role in roles] == [None, 0, 1, 2, 0, 1, 2, None]
    assert [role.shard_rank for role in roles] == [None, 0, 1, 2, 3, 4, 5, None]
    assert [role.pushes_to for role in roles[1:7]] == [0, 1, 1, 0, 4, 4]
    assert [list(role.takes_from) for role in roles] == [[1, 4], [2, 3], [], [], [5, 6], [], [], []]
    assert [role.is_evaluator for role in roles] == [False] * 7 + [True]
    assert {(role.num_workers, role.num_shards) for role in roles} == {(2, 6)}


@pytest.mark.parametrize(
    ("size", "options", "said"),
    [
        (1, {}, "at least 2 ranks, one server and one worker, but this one has 1: start it with mpirun -n 2"),
        (2, {"evaluator": True}, "at least 3 ranks, one server and one worker, and one evaluator, but this one has 2"),
        (6, {"group": 2}, "5 computing ranks do not divide into groups of 2: start 5 or 7 ranks in all"),
        (6, {"group": 3, "evaluator": True}, "4 computing ranks do not divide into groups of 3: start 5 or 8 ranks"),
        (3, {"group": 4}, "2 computing ranks do not divide into groups of 4: start 5 ranks in all"),
        (3, {"group": 0}, "group=0: a worker has at least 1 rank"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(size: int, options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assign_role(0, size, **options)  # type: ignore[arg-type]
