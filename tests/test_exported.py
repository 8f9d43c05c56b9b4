"""The public names are these and no others."""

from __future__ import annotations

import pytest

import stalempi

PUBLIC = """
ASP Allreduce BP BSP BlockOptions CachedSSP Checkpoint ConfigError Context DDG DNI DSP DSSP DataLoader
DistributedOptimizer DistributedSampler Evaluation FR GPipe NonFiniteError OneForwardOneBackward PREEMPTED PipeDream
Pipeline PipelineStats Policy Preempted ProtocolError RunStats SSP Schedule StalempiError StallError TwoBW
UpdateOptions WorkerStats __version__ allreduce barrier broadcast_object broadcast_optimizer_state
broadcast_parameters device group_rank group_size init is_evaluator is_initialized is_server local_rank local_size
num_shards num_workers rank run shard_rank shutdown size worker_rank
""".split()


def test_the_public_names_are_pinned() -> None:
    assert sorted(stalempi.__all__) == sorted(PUBLIC)


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    assert [name for name in PUBLIC if not getattr(stalempi, name).__doc__] == []


@pytest.mark.parametrize("name", ["rank", "local_rank", "is_server", "worker_rank", "num_shards", "device", "barrier"])
def test_the_functions_of_a_rank_say_what_is_missing_before_init(name: str) -> None:
    with pytest.raises(stalempi.ConfigError, match=r"call stalempi.init\(\) first"):
        getattr(stalempi, name)()
