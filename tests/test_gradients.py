"""What users do to gradients between backward and step changes a job as it changes one process."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Policy
from stalempi.train.groups import decay_groups
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.train.schedule import Cosine, Warmup
from stalempi.transport.inproc import InprocTransport, run_ranks

from .job import make_context, run_job
from .small import data, fill, largest_difference, make_model, momentum, plain

Make = Callable[[nn.Module], torch.optim.Optimizer]


def backward(model: nn.Module, x: Tensor, y: Tensor, factor: float = 1.0) -> None:
    torch.autograd.backward(factor * nn.functional.cross_entropy(model(x), y))


def sgd_without_norms(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(decay_groups(model, 0.2), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("make", [momentum, sgd_without_norms], ids=["all decay", "decay groups"])
def test_accumulation_under_bsp_equals_one_process_on_the_joined_batches(make: Make, workers: int) -> None:
    """Worker w adds up w + 1 batches of 2 for each push, so that weights by samples matter; the rate is scheduled."""
    edges = [worker * (worker + 1) for worker in range(workers + 1)]
    batches = [data(edges[-1], seed) for seed in range(6)]
    total = edges[-1] * len(batches)
    schedule = Warmup(total // 3) * Cosine(total)

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            for start in range(edges[worker], edges[worker + 1], 2):
                backward(model, x[start : start + 2], y[start : start + 2], 1 / (worker + 1))
            optimizer.step()

    job = run_job(make_model, make, BSP(), train, workers=workers, schedule=schedule)
    assert job.stats.samples == total
    alone = make_model()
    optimizer = make(alone)
    rates = [group["lr"] for group in optimizer.param_groups]
    for number, (x, y) in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * schedule(number * edges[-1])
        optimizer.zero_grad()
        backward(alone, x, y)
        optimizer.step()
    assert largest_difference(make_model(), alone) > 0.01
    assert largest_difference(job.model, alone) < 2e-6


CLIPS = [{"clip_norm": 0.3}, {"clip_value": 0.05}, {"clip_norm": 0.2, "clip_value": 0.1}]


def clip(model: nn.Module, limits: dict[str, float]) -> None:
    if "clip_value" in limits:
        nn.utils.clip_grad_value_(model.parameters(), limits["clip_value"])
    if "clip_norm" in limits:
        nn.utils.clip_grad_norm_(model.parameters(), limits["clip_norm"])


def clipped_alone(limits: dict[str, float], parts: list[slice]) -> nn.Module:
    """One process that clips the gradient of each part of each batch."""
    model = make_model()
    optimizer = momentum(model)
    for number in range(8):
        x, y = data(6, number)
        for part in parts:
            optimizer.zero_grad()
            backward(model, x[part], y[part], 10.0)
            clip(model, limits)
            optimizer.step()
    return model


@pytest.mark.parametrize("limits", CLIPS, ids=str)
@pytest.mark.parametrize("workers", [1, 2])
def test_clipping_on_the_server_under_bsp_is_of_the_mean(limits: dict[str, float], workers: int) -> None:
    edges = {1: [0, 6], 2: [0, 2, 6]}[workers]

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(8):
            x, y = data(6, number)
            optimizer.zero_grad()
            mine = slice(edges[worker], edges[worker + 1])
            backward(model, x[mine], y[mine], 10.0)
            optimizer.step()

    job = run_job(make_model, momentum, BSP(), train, workers=workers, **limits)  # type: ignore[arg-type]
    alone = clipped_alone(limits, [slice(None)])
    assert largest_difference(clipped_alone({}, [slice(None)]), alone) > 0.1
    assert largest_difference(job.model, alone) < 2e-6


@pytest.mark.parametrize("policy", [ASP(), SSP(0), CachedSSP(3)], ids=str)
def test_clipping_on_the_server_is_of_each_push_where_pushes_are_applied_one_by_one(policy: Policy) -> None:
    """A worker that goes on alone clips as the server does."""

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        for number in range(8):
            optimizer.zero_grad()
            backward(model, *data(6, number), 10.0)
            optimizer.step()

    job = run_job(
        make_model, plain if isinstance(policy, CachedSSP) else momentum, policy, train, workers=1, clip_norm=0.3
    )
    if isinstance(policy, CachedSSP):
        assert largest_difference(job.model, job.workers[0]) == 0.0
        assert largest_difference(job.model, make_model()) < 8 * 0.5 * 0.3
    else:
        assert largest_difference(job.model, clipped_alone({"clip_norm": 0.3}, [slice(None)])) == 0.0


@pytest.mark.parametrize("limits", [{"clip_norm": 0.0}, {"clip_value": -1.0}, {"clip_norm": math.nan}])
def test_limits_that_cannot_be_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"clip_(norm|value)=.*finite number above 0"):
        run_job(make_model, plain, ASP(), lambda *_: None, workers=1, **limits)  # type: ignore[arg-type]


def scaled_loop(model: nn.Module, optimizer: torch.optim.Optimizer, *, unscale: bool, overflows: set[int]) -> float:
    """Trains 8 steps under a GradScaler, which meets infinity at `overflows`; returns its last scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for number in range(8):
        x, y = data(6, number)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * (math.inf if number in overflows else 1.0)
        torch.autograd.backward(scaler.scale(loss))
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale, clip, step"])
@pytest.mark.parametrize("policy", [ASP(), BSP(), CachedSSP(2)], ids=str)
def test_a_gradient_scaler_works_as_in_plain_torch_to_the_last_bit(policy: Policy, unscale: bool) -> None:
    make = plain if isinstance(policy, CachedSSP) else momentum
    scales: list[float] = []

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        scales.append(scaled_loop(model, optimizer, unscale=unscale, overflows={2, 6}))

    job = run_job(make_model, make, policy, train, workers=1)
    alone = make_model()
    assert scales == [scaled_loop(alone, make(alone), unscale=unscale, overflows={2, 6})]
    assert largest_difference(job.model, alone) == 0.0
    assert largest_difference(job.workers[0], alone) == 0.0
    worker = job.stats.workers[0]
    assert (worker.iterations, worker.applied, worker.skipped, worker.nonfinite) == (8, 6, 2, 0)
    assert (job.stats.updates, job.stats.samples) == (6, 36)


def make_scaler(scale: float) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(1))  # it begins with the first loss
    return scaler


@pytest.mark.parametrize("policy", [ASP(), BSP(), BSP(backup=1), SSP(0), SSP(2), CachedSSP(1), DSSP(1, 3)], ids=str)
def test_an_empty_push_keeps_the_clock_going_and_counts_nowhere(policy: Policy) -> None:
    """Worker w skips steps w and w + 3; gradients are ones, so that the weights say how many updates were made."""

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        scaler = make_scaler(4.0)
        for number in range(6):
            fill(model, math.nan if number % 3 == worker else scaler.get_scale())
            scaler.step(optimizer, samples=2)
            scaler.update()
            assert optimizer.step_count == number + 1

    job = run_job(make_model, plain, policy, train, workers=3)
    for worker in job.stats.workers:
        assert worker.iterations == 6
        assert worker.applied + worker.dropped + worker.skipped == 6
        assert worker.skipped == 2
        assert worker.samples == 2 * worker.applied
    gone = next(make_model().parameters()) - next(job.model.parameters())
    assert torch.allclose(gone, torch.full_like(gone, 0.5 * job.stats.updates), atol=1e-4)
    if policy == BSP():
        assert job.stats.updates == 6


def test_under_bsp_a_skipped_gradient_has_no_weight_in_its_round() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        scaler = make_scaler(1.0)
        fill(model, math.inf if worker == 0 else 3.0)
        scaler.step(optimizer, samples=[100, 1][worker])

    job = run_job(make_model, plain, BSP(), train, workers=2)
    gone = next(make_model().parameters()) - next(job.model.parameters())
    assert torch.allclose(gone, torch.full_like(gone, 1.5))
    assert job.stats.samples == 1


def test_a_round_of_nothing_but_skips_is_no_update() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        scaler = make_scaler(1.0)
        fill(model, math.inf)
        scaler.step(optimizer)

    job = run_job(make_model, momentum, BSP(), train, workers=2)
    assert (job.stats.updates, job.stats.samples) == (0, 0)
    assert largest_difference(job.model, make_model()) == 0.0


def test_autocast_without_a_scaler_trains_as_in_plain_torch() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(5):
            x, y = data(6, number)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            torch.autograd.backward(loss)
            optimizer.step()

    job = run_job(make_model, momentum, ASP(), lambda m, o, _: loop(m, o), workers=1)
    alone = make_model()
    loop(alone, momentum(alone))
    assert largest_difference(job.model, alone) == 0.0


def make_cnn() -> nn.Module:
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    return nn.Sequential(layers, nn.Linear(4 * 4 * 4, 2))


def images(size: int, seed: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 8, 8, generator=draws), torch.randint(2, (size,), generator=draws)


def test_a_channels_last_model_stays_so_and_trains_as_in_plain_torch() -> None:
    def make() -> nn.Module:
        return make_cnn().to(memory_format=torch.channels_last)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(4):
            x, y = images(6, number)
            optimizer.zero_grad()
            backward(model, x.to(memory_format=torch.channels_last), y)
            optimizer.step()
            kernels = [p for p in model.parameters() if p.dim() == 4]
            assert all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)
            assert not any(p.is_contiguous() for p in kernels)
            assert all(p.grad is not None and p.grad.stride() == p.stride() for p in kernels)

    job = run_job(make, momentum, ASP(), lambda m, o, _: loop(m, o), workers=1)
    alone = make()
    loop(alone, momentum(alone))
    assert largest_difference(job.model, alone) == 0.0
    assert largest_difference(job.workers[0], alone) == 0.0


def compiled(model: nn.Module) -> nn.Module:
    found: object = torch.compile(model, backend="eager")
    assert isinstance(found, nn.Module)
    return found


@pytest.mark.parametrize("form", ["given compiled", "compiled after", "compiled in place"])
def test_a_compiled_model_trains_as_a_plain_one(form: str) -> None:
    """Backend eager: what is tested is dynamo's tracing around our views and hooks, not a C++ compiler."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(4):
            optimizer.zero_grad()
            backward(model, *images(4 + number % 2, number))
            optimizer.step()

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        if form == "compiled in place":
            model.compile(backend="eager")
        loop(compiled(model) if form == "compiled after" else model, optimizer)

    def make() -> nn.Module:
        return compiled(make_cnn()) if form == "given compiled" else make_cnn()

    job = run_job(make, momentum, ASP(), train, workers=1)
    alone = make_cnn()
    loop(alone, momentum(alone))
    plain_model = getattr(job.model, "_orig_mod", job.model)
    assert largest_difference(plain_model, alone) == 0.0
    assert job.stats.samples == 4 + 5 + 4 + 5


def test_only_workers_need_to_compile_and_a_snapshot_has_the_plain_names() -> None:
    models = [compiled(make_model()), make_model()]
    names: list[list[str]] = []

    def main(transport: InprocTransport) -> None:
        context, model = make_context(transport), models[transport.rank]
        optimizer = DistributedOptimizer(plain(model), model=model, policy=ASP(), context=context, stall_timeout=20)
        with optimizer:
            if context.is_server:
                optimizer.serve()
                names.append(list(optimizer.snapshot()))

    run_ranks(main, 2)
    assert names == [list(make_model().state_dict())]


def test_parameter_groups_are_settled_at_the_start() -> None:
    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        with pytest.raises(ConfigError, match="agreed on at the start"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    run_job(make_model, plain, ASP(), train, workers=1)
