"""What a user holds of a pipeline, each rank a thread of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stalempi import context as contexts
from stalempi.context import Context
from stalempi.errors import ConfigError
from stalempi.pipeline.build import BlockOptions
from stalempi.pipeline.pipeline import Pipeline
from stalempi.pipeline.schedules import BP, DSP, GPipe, OneForwardOneBackward, PipeDream, Schedule, TwoBW
from stalempi.roles import assign_block
from stalempi.train.checkpoint import CheckpointStore
from stalempi.transport.inproc import InprocTransport, run_ranks

from .nets import batches, loss_of, plain_run, sgd

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Lets a test that fails leave nothing that the end of the process would take for a job."""
    yield
    contexts.open_jobs.clear()


def make(transport: InprocTransport, model: nn.Module | None = None, **options: Any) -> Pipeline:
    """Returns this rank's end of a pipeline through `model`, two linear layers by default."""
    context = Context(
        rank=transport.rank,
        size=transport.size,
        local_rank=transport.rank,
        local_size=transport.size,
        device=torch.device("cpu"),
        role=assign_block(transport.rank, transport.size, transport.size),
        transport=transport,
    )
    model = model or nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"identity": {"batch size": 16}}, "is of batch size 32, this run is of batch size 16"),
        ({"options": BlockOptions(seed=1)}, "is of seed 0, this run is of seed 1"),
        ({"method": DSP((1, 0), (2, 0))}, r"is of method bp, this run is of method dsp\(1,0;2,0\)"),
        ({"method": BP(2)}, "is of batches an update 1, this run is of batches an update 2"),
        ({"replicas": 2, "split": []}, "is of blocks 2, replicas 1, this run is of blocks 1, replicas 2"),
    ],
)
def test_a_run_that_is_not_the_saved_one_is_not_resumed_and_says_how_both_are(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    as_saved: dict[str, Any] = {"split": [1], "method": BP(), "identity": {"batch size": 32}}

    def save(transport: InprocTransport) -> None:
        with make(transport, **as_saved) as pipe:
            pipe.step(*batches(1)[0])
            pipe.save_checkpoint(CheckpointStore(tmp_path))

    def resume(transport: InprocTransport) -> None:
        pipe = make(transport, **{**as_saved, **changed})
        with pytest.raises(ConfigError, match=f"{said}: resume it as it was, or start fresh"):
            pipe.load_checkpoint(CheckpointStore(tmp_path).newest())

    run_ranks(save, 2)
    run_ranks(resume, 2)


def test_rank_0_alone_says_what_a_run_goes_on_from(tmp_path: Path) -> None:
    def main(transport: InprocTransport) -> None:
        with make(transport, split=[1]) as pipe:
            assert pipe.load_checkpoint(None if pipe.is_first else tmp_path / "seen by one rank only") is None
            pipe.step(*batches(1)[0])
            path = pipe.save_checkpoint(CheckpointStore(tmp_path), {"place": 1})
            assert (path is not None) == pipe.is_first
        with make(transport, split=[1]) as pipe:
            assert pipe.load_checkpoint(path) == {"place": 1}
            assert pipe.stats.steps == 1

    run_ranks(main, 2)


@pytest.mark.parametrize("method", [GPipe(3), OneForwardOneBackward(3), TwoBW(3), BP(), BP(2)], ids=str)
def test_the_loss_of_a_batch_is_the_mean_over_its_samples(method: Schedule) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    (x, y), *_ = batches(1, 7)  # micro-batches of 3, 2 and 2
    wanted = float(loss_of(model(x), y).detach())

    def main(transport: InprocTransport) -> float | None:
        with make(transport, copy.deepcopy(model), split=[1], method=method) as pipe:
            first = pipe.step(x, y)
            pipe.drain()
            kept = pipe._known().block.losses
            assert len(kept) == pipe.is_last
            return first if first is not None or not kept else kept[-1]

    assert run_ranks(main, 2) == [None, pytest.approx(wanted, rel=1e-6)]


class Branching(nn.Module):
    """A model that is not sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.one(x)) * self.two(x))
        return y


@pytest.mark.parametrize("method", [BP(), GPipe(1), DSP((0,), (0,)), PipeDream()], ids=str)
def test_a_model_that_is_not_sequential_is_one_block(method: Schedule) -> None:
    torch.manual_seed(0)
    model, data = Branching(), batches(5)
    wanted = plain_run([model], sgd, data).state_dict()

    def main(transport: InprocTransport) -> None:
        with make(transport, copy.deepcopy(model), method=method) as pipe:
            for x, y in data:
                pipe.step(x, y)
            assert 0 <= pipe.evaluate(data) <= 1
            found = pipe.state_dict()
        assert all(torch.equal(found[key], wanted[f"0.{key}"]) for key in model.state_dict())

    run_ranks(main, 1)


def test_a_model_that_is_not_sequential_is_filled_in_as_one_block() -> None:
    with torch.device("meta"):
        model = Branching()

    def main(transport: InprocTransport) -> None:
        with make(transport, model) as pipe:
            pipe.step(*batches(1)[0])
            assert sorted(pipe.state_dict()) == sorted(Branching().state_dict())

    run_ranks(main, 1)


@pytest.mark.parametrize("split", [None, [2]])
@pytest.mark.parametrize("running_stats", ["recompute", "forward"])
def test_modules_stay_in_the_modes_that_the_user_gave_them(split: list[int] | None, running_stats: str) -> None:
    def main(transport: InprocTransport) -> None:
        frozen, free = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        model = nn.Sequential(nn.Linear(4, 6), frozen.eval(), nn.Linear(6, 6), free, nn.Linear(6, 3))
        options = BlockOptions(running_stats=running_stats)
        with make(transport, model, split=split, method=DSP((1, 0), (2, 0)), options=options) as pipe:
            for x, y in batches(4):
                pipe.step(x, y)
            pipe.evaluate(batches(1))
            for x, y in batches(2):
                pipe.step(x, y)
            pipe.drain()
            state = pipe.state_dict()
            modes = [m.training for m in pipe.module.modules() if isinstance(m, nn.BatchNorm1d)]
            assert modes == [m.training for m in (frozen, free) if m in set(pipe.module.modules())]
        if pipe.is_first:
            assert state["1.running_mean"].tolist() == [0.0] * 6
            assert state["1.num_batches_tracked"] == 0
            assert state["3.num_batches_tracked"] == 6

    run_ranks(main, 2)
