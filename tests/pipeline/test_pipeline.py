"""What a user holds of a pipeline, each rank a thread of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stalempi import context as contexts
from stalempi.context import Context
from stalempi.errors import ConfigError
from stalempi.pipeline.pipeline import Pipeline
from stalempi.pipeline.schedules import BP, DSP, Schedule
from stalempi.roles import assign_block
from stalempi.transport.inproc import InprocTransport, run_ranks

from .nets import batches, loss_of, sgd

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Lets a test that fails leave nothing that the end of the process would take for a job."""
    yield
    contexts.open_jobs.clear()


def make(transport: InprocTransport, **options: Any) -> Pipeline:
    """Returns this rank's end of a pipeline through two linear layers."""
    context = Context(
        rank=transport.rank,
        size=transport.size,
        local_rank=transport.rank,
        local_size=transport.size,
        device=torch.device("cpu"),
        role=assign_block(transport.rank, transport.size, transport.size),
        transport=transport,
    )
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    return Pipeline(model, optimizer=sgd, loss=loss_of, context=context, stall_timeout=20, **options)


@pytest.mark.parametrize(
    ("blocks", "method"),
    [(1, BP()), (1, BP(3)), (2, BP(3)), (2, DSP((1, 0), (4, 0)))],
    ids=str,
)
@pytest.mark.parametrize("due", [0, 1, 3])
def test_a_pause_reaches_all_copies_at_one_batch_however_late_the_next_update_is(
    blocks: int, method: Schedule, due: int
) -> None:
    def main(transport: InprocTransport) -> list[int]:
        asked = iter(range(100))
        pipe = make(
            transport,
            method=method,
            replicas=2,
            split=[1][: blocks - 1],
            wants_stop=lambda: False,
            wants_pause=lambda: next(asked) == due,  # once, as a checkpoint is due once
        )
        paused = []
        with pipe:
            for number, (x, y) in enumerate(batches(12)):
                pipe.step(x, y)
                if pipe.pausing:
                    paused.append(number)
        return paused

    first, *others = run_ranks(main, 2 * blocks)
    assert len(first) == 1
    assert due < first[0] <= due + 5
    assert others == [first] * (2 * blocks - 1)


def test_a_state_that_was_returned_does_not_go_on_training() -> None:
    def main(transport: InprocTransport) -> None:
        with make(transport, method=BP(), split=[1]) as pipe:
            (x, y), *_ = batches(1)
            pipe.step(x, y)
            state = pipe.state_dict()
            before = {key: value.clone() for key, value in state.items()}
            pipe.step(x, y)
            assert len(state) == (4 if pipe.is_first else 0)
            assert all(torch.equal(state[key], before[key]) for key in state)

    run_ranks(main, 2)


@pytest.mark.parametrize("what", ["module", "optimizer", "stats"])
def test_what_needs_a_cut_model_is_refused_before_the_first_step_on_every_rank(what: str) -> None:
    def main(transport: InprocTransport) -> None:
        pipe = make(transport)
        if not pipe.is_first:  # alone: no rank may have to wait for another one
            with pytest.raises(ConfigError, match="the model is not cut yet"):
                getattr(pipe, what)
        pipe.step(*batches(1)[0])
        assert pipe.stats.steps == 1
        pipe.close()

    run_ranks(main, 2)
