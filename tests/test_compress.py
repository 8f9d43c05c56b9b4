"""What is compressed comes back as promised, and nothing that error feedback keeps is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stalempi.compress import Compression, Half, TopK, Wire, make_compression
from stalempi.errors import ConfigError, NonFiniteError
from stalempi.flat import Flat
from stalempi.policy import ASP, BSP, SSP, Allreduce, CachedSSP, Policy
from stalempi.train.optimizer import DistributedOptimizer

from .job import run_job
from .small import data, largest_difference, make_model, momentum, plain, step

torch.set_num_threads(1)
SHAPES = [(7, 3), (5,), (2, 3, 4), (1,)]


def filled(seed: int, dtype: torch.dtype = torch.float32) -> Flat:
    draws = torch.Generator().manual_seed(seed)
    flat = Flat([torch.empty(shape, dtype=dtype) for shape in SHAPES])
    for view in flat.views:
        view.copy_(torch.randn(view.shape, generator=draws, dtype=dtype))
    return flat


def wires(compression: Compression | None, dtype: torch.dtype, bucket_bytes: int) -> tuple[Flat, Wire, Flat, Wire]:
    """Returns a sender's gradients and wire, and a receiver's."""
    here, there = filled(0, dtype), filled(1, dtype)
    return (
        here,
        Wire(here, bucket_bytes=bucket_bytes, compression=compression),
        there,
        Wire(there, bucket_bytes=bucket_bytes, compression=compression),
    )


def travel(sent: Wire, received: Wire) -> int:
    """Moves the bytes and returns how many they are."""
    for a, b in zip(sent.tensors, received.tensors, strict=True):
        b.copy_(a)
    return sum(a.nbytes for a in sent.tensors)


buckets = st.sampled_from([64, 128, 1 << 20])
dtypes = st.sampled_from([torch.float32, torch.float64])


@given(buckets, dtypes, st.sampled_from([torch.float16, torch.bfloat16]))
@settings(deadline=None, max_examples=25)
def test_two_bytes_bring_the_rounded_gradient(bucket_bytes: int, dtype: torch.dtype, half: torch.dtype) -> None:
    here, sent, there, received = wires(Half(half), dtype, bucket_bytes)
    sent.encode()
    assert travel(sent, received) == here.nbytes * 2 // dtype.itemsize
    received.decode()
    for mine, theirs in zip(here.storages, there.storages, strict=True):
        assert torch.equal(theirs, mine.to(half).to(dtype))


@given(buckets, dtypes, st.sampled_from([0.01, 0.2, 0.5, 1.0]))
@settings(deadline=None, max_examples=25)
def test_the_largest_elements_come_and_the_rest_is_kept_for_later(
    bucket_bytes: int, dtype: torch.dtype, share: float
) -> None:
    here, sent, there, received = wires(TopK(share), dtype, bucket_bytes)
    total, arrived = torch.zeros_like(here.storages[0]), torch.zeros_like(here.storages[0])
    for number in range(5):
        here.storages[0].copy_(filled(number, dtype).storages[0])
        total += here.storages[0]
        kept = total - arrived
        sent.encode()
        travel(sent, received)
        received.decode()
        brought = there.storages[0]
        assert torch.allclose(brought[brought != 0], kept[brought != 0])
        if bucket_bytes == 1 << 20 and share < 1:
            assert float(kept[brought == 0].abs().max()) <= float(kept[brought != 0].abs().min()) + 1e-6
        arrived += brought
    left = torch.cat([code._rest for code in reversed(sent.codes)])  # type: ignore[attr-defined]
    assert torch.allclose(arrived + left, total, atol=1e-5)
    assert share == 1 or left.any()


def test_a_whole_share_is_no_compression_and_small_ones_cost_few_bytes() -> None:
    here, sent, there, received = wires(TopK(1.0), torch.float32, 1 << 20)
    sent.encode()
    travel(sent, received)
    received.decode()
    assert torch.equal(here.storages[0], there.storages[0])
    few = Wire(here, bucket_bytes=1 << 20, compression=TopK(0.1))
    assert sum(t.nbytes for t in few.tensors) == 8 * 10  # of 96 elements, each of 4 bytes and a place of 4


def test_nothing_is_copied_without_compression_and_whole_numbers_are_never_compressed() -> None:
    here = filled(0)
    assert [t.data_ptr() for t in Wire(here, bucket_bytes=64, compression=None).tensors][-1] == (
        here.storages[0].data_ptr()
    )
    halves = Flat([torch.ones(5, dtype=torch.bfloat16)])
    assert Wire(halves, bucket_bytes=64, compression=Half(torch.float16)).tensors[0].data_ptr() == (
        halves.storages[0].data_ptr()
    )


@pytest.mark.parametrize("text", ["gzip", "fp16:2", "topk", "topk:", "topk:0", "topk:1.5", "topk:nan", "", "topk:-1"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="topk"):
        make_compression(text)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for number in range(6):
        optimizer.zero_grad()
        x, y = data(5, number)
        nn.functional.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(change(parameter.grad))
        optimizer.step()


@pytest.mark.parametrize("policy", [ASP(), BSP(), CachedSSP(4)], ids=str)
@pytest.mark.parametrize(("text", "half"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_one_worker_is_plain_torch_with_rounded_gradients(policy: Policy, text: str, half: torch.dtype) -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(6):
            step(model, optimizer, *data(5, number))

    make = plain if isinstance(policy, CachedSSP) else momentum
    done = run_job(make_model, make, policy, train, workers=1, compression=text, bucket_bytes=64)
    alone = make_model()
    loop(alone, make(alone), lambda gradient: gradient.to(half).float())
    assert largest_difference(done.model, alone) == 0.0
    if isinstance(policy, CachedSSP):
        assert largest_difference(done.workers[0], alone) == 0.0  # what it applied itself is what the server did
    plainly = run_job(make_model, make, policy, train, workers=1, bucket_bytes=64)
    assert 2 * done.stats.workers[0].bytes_pushed == plainly.stats.workers[0].bytes_pushed > 0


@pytest.mark.parametrize("options", [{}, {"run_ahead": True}, {"group": 2}], ids=str)
@pytest.mark.parametrize("text", ["topk:0.3", "fp16"])
def test_with_plain_sgd_what_is_left_out_comes_later(text: str, options: dict[str, Any]) -> None:
    """Under a constant gradient the parameters go as far as without compression, but for what is still left over."""
    weights = torch.tensor([0.1, 1.0, 0.3, 0.01, 0.5, 0.2])

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6))

    def train(model: Any, optimizer: DistributedOptimizer, worker: int) -> None:
        for _ in range(60):
            optimizer.zero_grad()
            (model.weight * weights).sum().backward()
            optimizer.step(samples=1)

    done = run_job(Line, plain, SSP(1), train, workers=1, compression=text, **options)
    gone = -dict(done.model.named_parameters())["weight"] / 0.5
    assert torch.allclose(gone, 60 * weights, atol=2.0 if text != "fp16" else 0.01)
    assert (gone > 0).all()


def test_a_parameter_whose_gradient_is_left_over_is_updated_without_a_new_one() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def train(model: Any, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(4):
            optimizer.zero_grad()
            loss = (model.a * torch.tensor([2.0, 1.0])).sum() if number == 0 else (0.01 * model.b).sum()
            loss.backward()
            optimizer.step(samples=1)

    done = run_job(Two, plain, ASP(), train, workers=1, compression="topk:0.03")  # one element of 32 a push
    assert dict(done.model.named_parameters())["a"].tolist() == [-1.0, -0.5]


def test_an_overflow_on_the_way_is_noticed_and_the_cure_is_named() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        x, y = data(5)
        optimizer.zero_grad()
        (1e6 * nn.functional.cross_entropy(model(x), y)).backward()
        optimizer.step()

    with pytest.raises(NonFiniteError, match="bf16 does not"):
        run_job(make_model, plain, ASP(), train, workers=1, compression="fp16", stall_timeout=0.5)
    assert run_job(make_model, plain, ASP(), train, workers=1, compression="bf16").stats.updates == 1


def test_a_nan_does_not_stay_in_what_is_left_over() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(5):
            x, y = data(5, number)
            step(model, optimizer, x * (float("nan") if number == 2 else 1.0), y)

    done = run_job(make_model, plain, ASP(), train, workers=1, compression="topk:0.1", nonfinite="skip")
    assert (done.stats.workers[0].nonfinite, done.stats.updates) == (1, 4)
    assert all(bool(torch.isfinite(p).all()) for p in done.model.parameters())


def test_mpi_cannot_add_up_what_is_compressed() -> None:
    with pytest.raises(ConfigError, match="cannot read it"):
        run_job(make_model, plain, Allreduce(), lambda *_: None, workers=1, compression="fp16", stall_timeout=0.5)
