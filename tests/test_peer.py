"""Workers without a server make the same update, send early only what will not change, and wait for nobody for ever."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from stalempi import preempt
from stalempi.correction import make_correction
from stalempi.errors import ConfigError, NonFiniteError, StallError
from stalempi.flat import Flat
from stalempi.gradients import GradientBook
from stalempi.policy import BSP, Allreduce, Decision, Event, Leave, Push
from stalempi.sums import BucketSums
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport.base import PeerEnd
from stalempi.transport.inproc import InprocTransport, run_ranks
from stalempi.transport.staging import Copied, Copier

from .job import make_context, run_job
from .small import data, largest_difference, make_model, momentum, step

torch.set_num_threads(1)
T = TypeVar("T")
Loop = Callable[[nn.Module, DistributedOptimizer, int], T]


def together(
    loop: Loop[T],
    *,
    ranks: int = 2,
    policy: Callable[[], Allreduce] = Allreduce,
    make: Callable[[], nn.Module] = make_model,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
    **options: object,
) -> list[tuple[nn.Module, DistributedOptimizer, T]]:
    """Runs `loop(model, optimizer, rank)` on every rank of a job without a server, and closes."""
    models = [make() for _ in range(ranks)]

    def main(transport: InprocTransport) -> tuple[nn.Module, DistributedOptimizer, T]:
        model = models[transport.rank]
        given: dict[str, object] = {"stall_timeout": 20.0, "bucket_bytes": 64} | options
        optimizer = DistributedOptimizer(
            make_optimizer(model),
            model=model,
            policy=policy(),
            context=make_context(transport),
            **given,  # type: ignore[arg-type]
        )
        with optimizer:
            result = loop(model, optimizer, transport.rank)
        return model, optimizer, result

    return run_ranks(main, ranks)


def sums_of(optimizer: DistributedOptimizer) -> BucketSums:
    return optimizer._worker._sums  # type: ignore[union-attr]


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def two_backwards(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    for half in (slice(0, 2), slice(2, None)):
        nn.functional.cross_entropy(model(x[half]), y[half]).backward()
    optimizer.step()


@pytest.mark.parametrize("one_step", [step, clipped_step, two_backwards])
def test_whatever_is_done_to_gradients_the_result_is_that_of_bsp(one_step: Callable[..., None]) -> None:
    def loop(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> bool:
        for number in range(4):
            one_step(model, optimizer, *data(5 + worker, seed=10 * worker + number))
        return not served and sums_of(optimizer).buckets.early

    served = False
    (ours, _, early), (other, _, _) = together(loop)
    assert early == (one_step is step)  # only plain steps may send before `step`
    served = True
    theirs = run_job(make_model, momentum, BSP(), loop, workers=2)
    assert largest_difference(ours, theirs.model) < 1e-6
    assert largest_difference(ours, other) == 0


def test_leaving_with_a_gradient_that_has_begun_to_go_is_refused() -> None:
    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
        for number in range(3):
            optimizer.zero_grad()
            x, y = data(6, seed=10 * number + rank)
            nn.functional.cross_entropy(model(x), y).backward()
            if number < 2:
                optimizer.step()

    with pytest.raises(ConfigError, match="leaves with a gradient"):
        together(loop)


def test_buckets_go_while_backward_goes_on_from_the_second_step() -> None:
    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> list[int]:
        sent = []
        for _ in range(3):
            x, y = data(6, seed=rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            sent.append(sums_of(optimizer).buckets.handed)
            optimizer.step()
        return sent

    for _, optimizer, sent in together(loop):
        assert sent == [0] + [len(sums_of(optimizer).totals)] * 2
    for _, _, sent in together(loop, policy=lambda: Allreduce(overlap=False)):
        assert sent == [0, 0, 0]


@pytest.mark.parametrize("late", [clipped_step, two_backwards])
def test_a_gradient_that_changes_after_it_was_sent_is_refused(late: Callable[..., None]) -> None:
    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
        step(model, optimizer, *data(6, seed=rank))
        late(model, optimizer, *data(6, seed=rank))

    with pytest.raises(ConfigError, match=r"changed after backward.*Allreduce\(overlap=False\)"):
        together(loop)
    together(loop, policy=lambda: Allreduce(overlap=False))


def test_a_number_of_samples_of_ones_own_counts_and_goes_late() -> None:
    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 4.0 * rank)
        optimizer.step(samples=1 + 2 * rank)

    (model, optimizer, _), _ = together(loop, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
    moved = next(make_model().parameters()) - next(model.parameters())
    assert torch.allclose(moved, torch.full_like(moved, 3.0), atol=1e-6)
    assert (optimizer.stats.samples, optimizer.stats.workers[1].samples) == (4, 3)


def test_half_precision_is_added_up_in_single() -> None:
    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 256.0 if rank == 0 else 1.0)
        optimizer.step(samples=1)

    def make() -> nn.Module:
        return nn.Linear(3, 2, bias=False).to(torch.bfloat16).requires_grad_()

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        nn.init.zeros_(next(model.parameters()))
        return torch.optim.SGD(model.parameters(), lr=1.0)

    results = together(loop, ranks=5, make=make, make_optimizer=make_optimizer)
    assert next(results[0][0].parameters()).unique().tolist() == [-52.0]  # 260 / 5; in bfloat16 256 + 1 is 256


def test_who_has_no_more_data_takes_part_with_nothing_and_follows_the_others_learning_rate() -> None:
    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
        for number in range(2 + 3 * rank):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + number)
            step(model, optimizer, *data(6, seed=rank))

    (first, optimizer, _), (second, _, _) = together(loop)
    assert largest_difference(first, second) == 0
    assert [worker.iterations for worker in optimizer.stats.workers] == [2, 5]
    assert (optimizer.stats.updates, optimizer.step_count) == (5, 2)


@pytest.mark.parametrize("asked", [0, 1])
def test_who_has_no_more_data_stops_with_the_others_and_can_be_the_one_that_is_asked(
    asked: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 takes two steps and then waits in close(); whichever rank has the signal, every rank ends with 75."""
    own = threading.local()
    monkeypatch.setattr(preempt, "requested", lambda: "SIGTEST" if getattr(own, "asked", False) else None)
    ends: dict[int, object] = {}

    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
        try:
            for number in range(2 if rank == 0 else 50):
                own.asked = rank == asked == 1 and number == 5
                step(model, optimizer, *data(4, seed=rank))
            own.asked = rank == asked
            optimizer.close()
        except preempt.Preempted as end:
            ends[rank] = end.code

    _, (_, optimizer, _) = together(loop)
    assert ends == {0: preempt.PREEMPTED, 1: preempt.PREEMPTED}
    assert optimizer.step_count < 50
    assert "no checkpoint, since there is no server" in capsys.readouterr().err


def test_all_are_done_in_the_same_step_and_rank_0_hears_of_every_push() -> None:
    heard: list[Event] = []

    def observe(event: Event, decisions: list[Decision]) -> None:
        heard.append(event)

    rates: list[float] = []

    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> int:
        while not optimizer.done:
            rates.append(optimizer.rate)
            step(model, optimizer, *data(4 + rank, seed=rank))
        return optimizer.step_count

    results = together(loop, total_samples=20, schedule=lambda samples: 0.0 if samples else 1.0, observe=observe)
    assert [result for _, _, result in results] == [3, 3]
    assert results[0][1].global_samples == 27
    assert sorted(rates) == [0.0] * 2 + [0.1] * 4  # before the first, and of the first and second update
    assert [type(event) for event in heard] == [Push] * 6 + [Leave] * 2
    once = together(lambda model, optimizer, rank: step(model, optimizer, *data(4 + rank, seed=rank)))
    assert largest_difference(results[0][0], once[0][0]) == 0  # the schedule allowed one step


def test_running_statistics_are_combined_at_the_end_on_every_rank() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4, momentum=1.0, affine=False), nn.Linear(4, 2))

    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
        step(model, optimizer, torch.full((2 + 2 * rank, 4), 3.0 * rank), torch.zeros(2 + 2 * rank, dtype=torch.long))

    for model, _, _ in together(loop, make=make):
        assert model.state_dict()["0.running_mean"].tolist() == [2.0] * 4


def poisoned(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
    for number in range(3):
        x, y = data(6, seed=rank)
        step(model, optimizer, x * (math.nan if (rank, number) == (1, 1) else 1.0), y)


def test_a_gradient_that_is_not_finite_is_named_or_its_round_left_out() -> None:
    with pytest.raises(NonFiniteError, match=r"worker 1 .* step 2"):
        together(poisoned)
    (model, optimizer, _), (other, _, _) = together(poisoned, nonfinite="skip")
    assert optimizer.stats.updates == 2
    assert [(w.nonfinite, w.dropped, w.iterations) for w in optimizer.stats.workers] == [(0, 1, 3), (1, 0, 3)]
    assert largest_difference(model, other) == 0
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_rank_that_never_comes_is_noticed() -> None:
    def loop(model: nn.Module, optimizer: DistributedOptimizer, rank: int) -> None:
        if rank == 1:
            time.sleep(0.6)
        step(model, optimizer, *data(6))

    with pytest.raises(StallError, match=r"worker 0 step 1: the sum over all ranks was not complete within 0\.3 s"):
        together(loop, stall_timeout=0.3)


def test_nothing_is_stale_so_there_is_nothing_to_correct() -> None:
    with pytest.raises(ConfigError, match=r"nothing to mend: under allreduce\(\)"):
        together(lambda *_: None, correction=make_correction("dc-asgd"))


class Slow:
    """A copy of the stand-in device: there when it is asked for the second time."""

    def __init__(self, device: Device, host: Tensor, source: Tensor) -> None:
        self.device, self.host, self.source, self.asked = device, host, source.clone(), 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked == 2:
            self.synchronize()
        return self.asked >= 2

    def synchronize(self) -> None:
        self.asked = 2
        self.host.copy_(self.source)


class Device(Copier):
    """Stands in for a device: its copies are late, and recorded."""

    def __init__(self) -> None:
        self.copies: list[Slow] = []

    def mirror(self, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, -1.0)

    def mark(self) -> Copied:
        raise AssertionError("nothing is sent from this device as it is")

    def copy_out(self, host: Tensor, device: Tensor) -> Copied:
        self.copies.append(Slow(self, host, device))
        return self.copies[-1]

    def copy_in(self, device: Tensor, host: Tensor) -> Copied:
        device.copy_(host)
        return Slow(self, host, host)


class Watched(PeerEnd):
    """Checks that what it is to add up has arrived in host memory."""

    def __init__(self, sums: BucketSums) -> None:
        self.sums, self.begun = sums, list[int]()

    def sum(self, place: int) -> None:
        assert bool((self.sums.totals[place] != -1).all()), "begun before its copy was there"
        self.begun.append(place)

    def exchange(self) -> None: ...

    def progress(self) -> None: ...

    def receive(self, timeout: float) -> bool:
        return True

    def close(self) -> None: ...


def test_a_bucket_of_a_device_is_not_added_up_before_its_copy_is_there() -> None:
    model, device = make_model(), Device()
    flat = Flat(list(model.parameters()))
    sums = BucketSums(list(model.parameters()), flat, bucket_bytes=64, overlap=True, seen=lambda: 6, copier=device)
    sums.end = end = Watched(sums)
    book = GradientBook(list(model.parameters()), flat, on_ready=sums.ready)
    everything = list(range(len(sums.totals)))
    for number in range(3):
        book.zero()
        x, y = data(6)
        nn.functional.cross_entropy(model(x), y).backward()
        assert (len(end.begun) > 0) == (number > 0)
        expected = [view.clone() for view in flat.views]
        sums.send_rest(6)
        assert end.begun == everything
        sums.bring_back(6)
        assert all(torch.allclose(a, b) for a, b in zip(flat.views, expected, strict=True))
        end.begun.clear()
        sums.settle()
        sums.buckets.begin()
        for total in sums.totals:
            total.fill_(-1)
    assert len(device.copies) == 3 * len(everything)
