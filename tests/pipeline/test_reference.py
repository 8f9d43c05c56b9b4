"""Whole runs in one process: every method against plain training, or against its own formula written out here."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from stalempi.errors import ConfigError, NonFiniteError, ProtocolError
from stalempi.pipeline.actions import Action
from stalempi.pipeline.build import BlockOptions, MakeOptimizer
from stalempi.pipeline.dryrun import Done
from stalempi.pipeline.predictor import make_predictor
from stalempi.pipeline.reference import Reference
from stalempi.pipeline.schedules import (
    BP,
    DDG,
    DNI,
    DSP,
    FR,
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    Schedule,
    TwoBW,
)
from stalempi.pipeline.update import UpdateOptions

from .nets import adam, batches, difference, loss_of, make_blocks, methods, momentum, plain_run, sgd, uniform

pytestmark = pytest.mark.usefixtures("one_thread")

Data = Sequence[tuple[Tensor, Tensor]]
OPTIMIZERS = pytest.mark.parametrize("optimizer", [momentum, adam])


def run(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    data: Data,
    optimizer: MakeOptimizer = momentum,
    *,
    options: BlockOptions | None = None,
    drain_at: Sequence[int] = (),
) -> Reference:
    """Trains a copy of the blocks, drained at the end, and before the batches given."""
    reference = Reference(copy.deepcopy(list(modules)), schedule, optimizer, loss_of, options=options)
    for n, (x, y) in enumerate(data):
        if n in drain_at:
            reference.drain()
        reference.step(x, y)
    reference.drain()
    return reference


def blocks_of(reference: Reference) -> list[nn.Module]:
    return [runner.block.module for runner in reference.runners]


# Plain training


@OPTIMIZERS
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_bp_is_plain_training_bit_for_bit(optimizer: MakeOptimizer, norm: bool, blocks: int) -> None:
    modules, data = make_blocks(blocks, norm=norm), batches(12)
    for schedule in (BP(), uniform(blocks, 0, 0)):
        assert difference(blocks_of(run(modules, schedule, data, optimizer)), plain_run(modules, optimizer, data)) == 0


@pytest.mark.parametrize("schedule", methods(1), ids=str)
def test_one_block_trains_as_one_model_does_with_every_method(schedule: Schedule) -> None:
    modules, data = make_blocks(1), batches(6)
    if schedule.accumulate > 1:
        data = [data[n // schedule.accumulate] for n in range(6 * schedule.accumulate)]  # a mean of equals
    found = run(modules, schedule, data)
    wanted = plain_run(modules, momentum, batches(6))
    exact = schedule.micro_batches == schedule.accumulate == 1
    assert difference(blocks_of(found), wanted) <= (0 if exact else 1e-6)


@pytest.mark.parametrize("schedule", [GPipe(1), GPipe(4), GPipe(3), OneForwardOneBackward(4), OneForwardOneBackward(3)])
@pytest.mark.parametrize("blocks", [2, 3])
def test_micro_batches_give_the_gradients_of_the_whole_batch(schedule: Schedule, blocks: int) -> None:
    """Batches of 8 are cut into parts of 2, or of 3, 3 and 2."""
    modules = [module.double() for module in make_blocks(blocks)]
    data = [(x.double(), y) for x, y in batches(1)]
    found = run(modules, schedule, data, sgd)
    wanted = run(modules, BP(), data, sgd)
    for mine, theirs, before in zip(blocks_of(found), blocks_of(wanted), modules, strict=True):
        for p, q, old in zip(mine.parameters(), theirs.parameters(), before.parameters(), strict=True):
            assert torch.allclose(old - p, old - q, rtol=1e-9, atol=1e-12)
            assert not torch.equal(old, q)
    later = [(x.double(), y) for x, y in batches(10)]
    assert difference(blocks_of(run(modules, schedule, later)), plain_run(modules, momentum, later)) < 1e-10


@pytest.mark.parametrize("parts", [2, 3])
def test_batches_are_accumulated_as_plain_training_accumulates_them(parts: int) -> None:
    modules, data = make_blocks(3), batches(7)  # the last group is not full
    found = run(modules, BP(parts), data, momentum)
    model = nn.Sequential(*copy.deepcopy(modules))
    optimizer = momentum(model.parameters())
    for start in range(0, 7, parts):
        group = data[start : start + parts]
        optimizer.zero_grad()
        for x, y in group:
            (loss_of(model(x), y) / len(group)).backward()
        optimizer.step()
    assert difference(blocks_of(found), model) < 1e-6
    assert [runner.block.updater.updates for runner in found.runners] == [-(-7 // parts)] * 3


@pytest.mark.parametrize("schedule", [BP(2), FR(accumulate=2), PipeDream(2)], ids=str)
def test_each_sample_counts_once_in_batches_of_unequal_size(schedule: Schedule) -> None:
    """Of one block, so that nothing is stale: two batches of 3 and 9 are one of 12."""
    modules = make_blocks(1)
    (x, y), *_ = batches(1, 12)
    found = run(modules, schedule, [(x[:3], y[:3]), (x[3:], y[3:])], sgd)
    assert difference(blocks_of(found), plain_run(modules, sgd, [(x, y)])) < 1e-6
    assert [runner.block.updater.samples for runner in found.runners] == [12]


# Stale methods, each against its formula


def by_formula(
    modules: Sequence[nn.Module],
    data: Data,
    lr: float,
    forward_version: Callable[[int, int], int],
    backward_version: Callable[[int, int], int],
) -> list[nn.Module]:
    """Trains by SGD as the papers write it: the weights of which update made and which judged each batch.

    `forward_version(k, n)` says how many updates the weights of block k had when batch n passed upwards, and
    `backward_version(k, n)` those where its gradient is taken, at the input that the lower blocks made (Eq. 5). Nothing
    here has queues or an order: each value is worked out from its definition.
    """

    @cache
    def weights(k: int, version: int) -> dict[str, Tensor]:
        if version == 0:
            return {name: p.detach().clone() for name, p in modules[k].named_parameters()}
        before, gradient = weights(k, version - 1), judged(k, version - 1)[1]
        return {name: w - lr * gradient[name] for name, w in before.items()}

    @cache
    def arrived(k: int, n: int) -> Tensor:
        if k == 0:
            return data[n][0]
        with torch.no_grad():
            below = functional_call(modules[k - 1], weights(k - 1, forward_version(k - 1, n)), (arrived(k - 1, n),))
        return torch.as_tensor(below)

    @cache
    def judged(k: int, n: int) -> tuple[Tensor, dict[str, Tensor]]:
        h = arrived(k, n).detach().clone().requires_grad_()
        own = {name: w.clone().requires_grad_() for name, w in weights(k, backward_version(k, n)).items()}
        out = functional_call(modules[k], own, (h,))
        target = loss_of(out, data[n][1]) if k == len(modules) - 1 else (out * judged(k + 1, n)[0]).sum()
        by_h, *by_own = torch.autograd.grad(target, [h, *own.values()])
        return by_h, dict(zip(own, by_own, strict=True))

    trained = copy.deepcopy(list(modules))
    for k, module in enumerate(trained):
        module.load_state_dict(weights(k, len(data)))
    return trained


def doubles(blocks: int, count: int) -> tuple[list[nn.Module], list[tuple[Tensor, Tensor]]]:
    return [m.double() for m in make_blocks(blocks)], [(x.double(), y) for x, y in batches(count)]


@pytest.mark.parametrize(
    "schedule",
    [
        DSP((1, 1, 0), (4, 2, 0)),
        DSP((2, 2, 0), (6, 3, 0), overlaps=False),
        DSP((5, 5, 0), (14, 7, 0)),
        DSP((1, 0, 0), (5, 3, 1)),
        FR(),
        FR(overlaps=False),
    ],
    ids=str,
)
def test_dsp_and_fr_take_the_gradient_of_equation_5(schedule: Schedule) -> None:
    modules, data = doubles(3, 20)
    delay = [schedule.delay(k, 3) for k in range(3)]
    wanted = by_formula(modules, data, 0.2, lambda k, n: max(0, n - delay[k]), lambda k, n: n)
    found = run(modules, schedule, data, sgd)
    assert difference(blocks_of(found), wanted) < 1e-12
    assert difference(wanted, plain_run(modules, sgd, data)) > 1e-3, "it is not the gradient of bp"


@pytest.mark.parametrize("schedule", [PipeDream(), DDG()], ids=str)
def test_pipedream_judges_a_batch_at_the_weights_that_made_its_forward(schedule: Schedule) -> None:
    modules, data = doubles(3, 12)

    def version(k: int, n: int) -> int:
        return max(0, n - (2 - k))

    found = run(modules, schedule, data, sgd)
    assert difference(blocks_of(found), by_formula(modules, data, 0.2, version, version)) < 1e-12


@pytest.mark.parametrize("parts", [3, 4])
def test_2bw_is_one_update_behind(parts: int) -> None:
    """w(t+1) = w(t) - lr grad f(w(t-1)), of the whole model, by hand."""
    modules, data = doubles(3, 10)
    found = run(modules, TwoBW(parts), data, sgd)
    assert difference(blocks_of(found), delayed_by_one(modules, data)) < 1e-12
    for runner in found.runners:
        assert dict(runner.block.staleness) == {0: parts, 1: 9 * parts}
        assert runner.block.weights.most_kept == 2


def delayed_by_one(modules: Sequence[nn.Module], data: Data) -> nn.Sequential:
    now, before = (nn.Sequential(*copy.deepcopy(list(modules))) for _ in range(2))
    for x, y in data:
        gradients = torch.autograd.grad(loss_of(before(x), y), list(before.parameters()))
        before.load_state_dict(now.state_dict())
        with torch.no_grad():
            for p, gradient in zip(now.parameters(), gradients, strict=True):
                p.sub_(gradient, alpha=0.2)
    return now


def test_dni_is_what_it_says_by_hand() -> None:
    """Block 0 follows its guess, block 1 the loss; the guess learns from block 1 a step later."""
    modules, data = make_blocks(2), batches(8)
    found = run(modules, DNI(), data, sgd, options=BlockOptions(seed=5))
    below, above = copy.deepcopy(modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        guess = make_predictor(below(data[0][0]).detach())
    teacher = torch.optim.Adam(guess.parameters(), lr=1e-3)
    optimizers = [sgd(below.parameters()), sgd(above.parameters())]
    mean_square = 0.0
    lesson: tuple[Tensor, Tensor] | None = None

    def teach() -> None:
        nonlocal mean_square
        assert lesson is not None
        h, error = lesson
        square = float((error**2).mean())
        mean_square = 0.99 * mean_square + 0.01 * square if mean_square else square
        teacher.zero_grad()
        ((guess(h) - error / mean_square**0.5) ** 2).mean().backward()
        teacher.step()

    for x, y in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = below(x)
        h = out.detach().requires_grad_()
        out.backward((guess(h).detach() * mean_square**0.5).detach())
        loss_of(above(h), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        if lesson is not None:
            teach()
        assert h.grad is not None
        lesson = (h.detach(), h.grad)
    teach()
    assert difference(blocks_of(found), [below, above]) < 1e-5
    predictor = found.runners[0].predictor
    assert predictor is not None
    assert predictor.net is not None
    assert difference([predictor.net], [guess]) < 1e-4
    assert found.runners[1].predictor is None


def test_ddg_is_pipedream_and_fr_is_dsp_bit_for_bit() -> None:
    modules, data = make_blocks(4, norm=True), batches(12)
    for one, other in ((DDG(), PipeDream()), (FR(), uniform(4, 0, 1)), (FR(), FR(overlaps=False))):
        assert difference(blocks_of(run(modules, one, data)), blocks_of(run(modules, other, data))) == 0


# Order, drains, books


@given(
    st.integers(1, 4).flatmap(lambda blocks: st.tuples(st.just(blocks), st.sampled_from(methods(blocks)))), st.randoms()
)
@settings(max_examples=15, deadline=None)
def test_results_do_not_depend_on_the_order_in_which_blocks_go_on(
    method: tuple[int, Schedule], draws: random.Random
) -> None:
    blocks, schedule = method
    modules, data = make_blocks(blocks, norm=True), batches(5, 12)
    wanted = run(modules, schedule, data)

    torch.manual_seed(draws.randrange(1000))  # nor on the user's random numbers
    found = Reference(copy.deepcopy(modules), schedule, momentum, loss_of)
    left = {runner: list(data) for runner in found.runners}
    while any(left.values()) or not all(runner.idle for runner in found.runners):
        runner = draws.choice(found.runners)
        if left[runner] and draws.random() < 0.5:
            x, y = left[runner].pop(0)
            runner.add_step((x,), (y,) if runner.block.is_last else None)
            if not left[runner]:
                runner.add_drain()
        elif draws.random() < 0.7:
            runner.advance(wait=False)
    assert difference(blocks_of(found), blocks_of(wanted)) == 0
    for mine, theirs in zip(found.runners, wanted.runners, strict=True):
        assert mine.block.staleness == theirs.block.staleness
        assert mine.block.losses == theirs.block.losses


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_measured_staleness_is_what_the_schedule_says(blocks: int) -> None:
    for schedule in methods(blocks):
        found = run(make_blocks(blocks), schedule, batches(12))
        for k, runner in enumerate(found.runners):
            seen = runner.block.staleness
            assert sum(seen.values()) == 12 * schedule.micro_batches
            assert max(seen) == schedule.staleness(k, blocks), (str(schedule), k)
            if schedule.accumulate == 1:
                wanted = [min(n, schedule.staleness(k, blocks)) for n in range(12)]
                assert sorted(seen.elements()) == sorted(wanted * schedule.micro_batches)
            assert runner.block.updater.updates == -(-12 // schedule.accumulate)
            assert runner.block.updater.samples == 96


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_drain_leaves_nothing_inside_and_training_goes_on_after_it(blocks: int) -> None:
    modules, data = make_blocks(blocks), batches(7)
    for schedule in methods(blocks):
        found = run(modules, schedule, data, drain_at=(1, 2, 5))
        for runner in found.runners:
            assert not runner.block._held
            assert not runner._here
            assert runner.batches == 7
            assert sum(runner.block.staleness.values()) == 7 * schedule.micro_batches
        assert len(found.runners[-1].block.losses) == 7


def test_a_pipe_drained_after_every_batch_is_bp() -> None:
    modules, data = make_blocks(3), batches(6)
    wanted = blocks_of(run(modules, BP(), data))
    for schedule in (FR(), PipeDream(), uniform(3, 1, 1), DDG()):
        assert difference(blocks_of(run(modules, schedule, data, drain_at=range(1, 6))), wanted) == 0


def test_an_empty_drain_does_nothing() -> None:
    for schedule in methods(2):
        found = Reference(make_blocks(2), schedule, sgd, loss_of)
        found.drain()
        found.drain()
        assert all(runner.block.updater.updates == 0 for runner in found.runners)


def test_every_action_is_recorded_with_the_batch_of_the_whole_run() -> None:
    done: list[Done] = []
    reference = Reference(make_blocks(2), FR(), sgd, loss_of, record=done.append)
    for n, (x, y) in enumerate(batches(4)):
        if n == 2:
            reference.drain()
        reference.step(x, y)
    reference.drain()
    lower = [str(d.action) for d in done if d.block == 0]
    part = "F{0} >F{0} R{0} F{1} >F{1} <B{0} B{0} U{0} R{1} <B{1} B{1} U{1}"
    assert lower == (part.format(0, 1) + " " + part.format(2, 3)).split()
    assert all(d.begin <= d.end for d in done)


def test_the_batch_of_a_user_may_be_filled_anew_while_it_is_inside() -> None:
    modules, data = make_blocks(3), batches(8)
    wanted = blocks_of(run(modules, uniform(3, 1, 1), data))
    reference = Reference(copy.deepcopy(modules), uniform(3, 1, 1), momentum, loss_of)
    x, y = torch.empty(8, 4), torch.empty(8, dtype=torch.int64)
    for new_x, new_y in data:
        x.copy_(new_x)
        y.copy_(new_y)
        reference.step(x, y)
    reference.drain()
    assert difference(blocks_of(reference), wanted) == 0


# What a batch and a block may be


@pytest.mark.parametrize("schedule", [GPipe(4), OneForwardOneBackward(4), TwoBW(4)], ids=str)
def test_a_batch_that_cannot_be_cut_is_refused_before_anything_is_done(schedule: Schedule) -> None:
    modules = make_blocks(2)
    found = Reference(copy.deepcopy(modules), schedule, sgd, loss_of)
    (x, y), *_ = batches(1)
    with pytest.raises(ConfigError, match=r"a batch of 3 sample\(s\) cannot be cut into 4 micro-batch\(es\)"):
        found.step(x[:3], y[:3])
    found.step(x, y)
    found.drain()
    assert difference(blocks_of(found), blocks_of(run(modules, schedule, [(x, y)], sgd))) == 0


def test_an_empty_batch_is_refused() -> None:
    found = Reference(make_blocks(2), BP(), sgd, loss_of)
    with pytest.raises(ConfigError, match=r"a batch of 0 sample\(s\) cannot be cut into 1"):
        found.step(torch.empty(0, 4), torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("schedule", [BP(2), FR(), uniform(3, 1, 1), PipeDream(), DNI(), GPipe(2), TwoBW(3)], ids=str)
def test_the_last_batch_of_an_epoch_may_be_smaller(schedule: Schedule) -> None:
    data = [*batches(4), *batches(1, 3, seed=9), *batches(2)]
    found = run(make_blocks(3), schedule, data)
    assert all(runner.block.updater.samples == 6 * 8 + 3 for runner in found.runners)
    assert all(bool(torch.isfinite(p).all()) for module in blocks_of(found) for p in module.parameters())


def test_a_message_of_another_batch_is_a_protocol_error() -> None:
    found = Reference(make_blocks(2), BP(), sgd, loss_of)
    (x, y), *_ = batches(1)
    below, above = found.runners
    below.add_step((x,), None)
    below.advance(wait=False)
    above.restart(3)
    above.add_step((x,), (y,))
    with pytest.raises(ProtocolError, match=r"got batch 0.0 from block 0 where batch 3.0 is due"):
        above.advance(wait=False)


def test_a_schedule_that_cannot_go_on_says_so() -> None:
    class Stuck(BP):
        def step(self, block: int, blocks: int, n: int) -> list[Action]:
            return sorted(super().step(block, blocks, n), key=lambda action: not action.op.is_receive)

    found = Reference(make_blocks(2), Stuck(), sgd, loss_of)
    found.step(*batches(1)[0])
    with pytest.raises(ConfigError, match="the schedule deadlocks: play it with"):
        found.drain()


def test_a_loss_that_diverges_stops_the_run() -> None:
    with pytest.raises(NonFiniteError, match="training diverged"):
        run(make_blocks(2), uniform(2, 1, 1), batches(40), lambda p: torch.optim.SGD(p, lr=1e38))


def test_dni_refuses_blocks_of_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.layer(x) * 2

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.as_tensor(self.layer(a + b))

    with pytest.raises(ConfigError, match="dni predicts one error gradient a block, but block 0 has 2"):
        run([Two(), Join()], DNI(), batches(1))
    run([Two(), Join()], FR(), batches(4))


# Options


def test_running_statistics_are_updated_once_a_batch_with_either_setting() -> None:
    modules, data = make_blocks(3, norm=True), batches(4)
    for schedule in methods(3):
        parts = schedule.micro_batches
        for running_stats in ("recompute", "forward"):
            if parts > 4:
                continue  # parts of one sample have no variance
            found = run(modules, schedule, data, options=BlockOptions(running_stats=running_stats))
            for module in blocks_of(found)[:2]:
                assert int(module.get_buffer("1.num_batches_tracked")) == 4 * parts


def test_dropout_does_not_depend_on_the_users_stream_or_move_it() -> None:
    modules = [nn.Sequential(module, nn.Dropout(0.3)) for module in make_blocks(2)]
    for schedule in (BP(), FR(), uniform(2, 1, 1), PipeDream(), GPipe(2)):
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            found.append(blocks_of(run(modules, schedule, batches(5))))
            assert torch.equal(torch.get_rng_state(), before)
        assert difference(*found) == 0
        other = blocks_of(run(modules, schedule, batches(5), options=BlockOptions(seed=1)))
        assert difference(found[0], other) > 0


def test_a_static_loss_scale_of_a_power_of_two_changes_no_bit() -> None:
    modules, data = make_blocks(3), batches(8)
    for schedule in (BP(), uniform(3, 1, 1), PipeDream()):
        plain = run(modules, schedule, data, sgd)
        scaled = run(modules, schedule, data, sgd, options=BlockOptions(update=UpdateOptions(loss_scale=1024.0)))
        assert difference(blocks_of(plain), blocks_of(scaled)) == 0
        assert plain.runners[-1].block.losses == scaled.runners[-1].block.losses


def test_a_learning_rate_by_samples_is_that_of_plain_training() -> None:
    modules, data = make_blocks(2), batches(6)
    options = BlockOptions(update=UpdateOptions(schedule=lambda samples: 0.1 if samples >= 24 else 1.0))
    found = run(modules, BP(), data, sgd, options=options)
    model = nn.Sequential(*copy.deepcopy(modules))
    optimizer = sgd(model.parameters())
    for n, (x, y) in enumerate(data):
        optimizer.param_groups[0]["lr"] = 0.2 * (0.1 if n >= 3 else 1.0)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    assert difference(blocks_of(found), model) == 0


@pytest.mark.parametrize("schedule", [BP(), FR(), uniform(3, 1, 1), PipeDream(), TwoBW(3), DNI()], ids=str)
def test_bfloat16_autocast_trains(schedule: Schedule) -> None:
    losses = learn(3, schedule, BlockOptions(autocast=torch.bfloat16))
    assert losses[-1] < 0.9 * losses[0]


def test_bp_under_autocast_is_plain_training_under_autocast() -> None:
    modules, data = make_blocks(2), batches(5)
    found = run(modules, BP(), data, options=BlockOptions(autocast=torch.bfloat16))
    model = nn.Sequential(*copy.deepcopy(modules))
    optimizer = momentum(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
    assert difference(blocks_of(found), model) == 0


def test_evaluation_is_that_of_the_whole_model() -> None:
    modules, data = make_blocks(3, norm=True), batches(5)
    found = run(modules, BP(), data)
    model = plain_run(modules, momentum, data).eval()
    x, _ = batches(1, 5, seed=3)[0]
    assert torch.equal(found.evaluate(x), model(x))
    found.step(*data[0])
    found.drain()


@pytest.mark.parametrize("schedule", methods(2), ids=str)
def test_every_method_learns(schedule: Schedule) -> None:
    losses = learn(2, schedule, BlockOptions())
    assert losses[-1] < 0.85 * losses[0]


def learn(blocks: int, schedule: Schedule, options: BlockOptions) -> list[float]:
    """Returns the losses while classes that are easy to see are learnt."""
    x, _ = batches(1, 24)[0]
    found = run(make_blocks(blocks), schedule, [(x, x[:, :3].argmax(1))] * 30, sgd, options=options)
    return list(found.runners[-1].block.losses)
