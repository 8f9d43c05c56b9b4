"""One block: its vector-Jacobian products at the right weights, its randomness, its running statistics, odd layers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from stalempi.errors import ConfigError, NonFiniteError
from stalempi.pipeline.block import Block
from stalempi.pipeline.schedules import BP, DSP, FR, GPipe, PipeDream, Schedule, TwoBW
from stalempi.pipeline.update import UpdateOptions, Updater, trained

from .nets import loss_of

pytestmark = pytest.mark.usefixtures("one_thread")

RECOMPUTING = [FR(), FR(overlaps=False), DSP((1, 1, 0), (4, 2, 0)), GPipe(1)]
KEEPING = [BP(), PipeDream(), TwoBW(3)]


def make(
    module: nn.Module,
    schedule: Schedule,
    number: int = 1,
    *,
    blocks: int = 3,
    lr: float = 0.5,
    scale: float = 1.0,
    running_stats: str = "recompute",
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> Block:
    parameters = trained(module)
    optimizer = torch.optim.SGD(parameters.values(), lr=lr) if parameters else None
    updater = Updater(parameters, optimizer, UpdateOptions(loss_scale=scale))
    last = loss_of if number == blocks - 1 else None
    return Block(
        module, number, blocks, schedule, updater, loss=last, running_stats=running_stats, autocast=autocast, seed=seed
    )


def once(
    block: Block, key: tuple[int, int], inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Takes one batch forward and back, and returns its outputs and the gradients for the block below."""
    outputs = block.forward(key, inputs)
    if not block._keeps_graph:
        block.recompute(key)
    return outputs, block.backward(key, gradients)


def move(block: Block) -> None:
    """Makes an update that is easy to see: every parameter loses a half of a half."""
    block.updater.gather({name: p.detach() * 0.5 for name, p in block.updater.parameters.items()}, 1)
    block.update()


def product(
    module: nn.Module, weights: Mapping[str, Tensor], inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Returns autograd's vector-Jacobian product, at weights given: by the inputs, and by the weights."""
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    points = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    outputs = functional_call(module, leaves, tuple(x.clone() for x in points))  # a layer may work in place
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward([o for o in outputs if o.is_floating_point()], list(gradients))
    by_inputs = tuple(x.grad for x in points if x.grad is not None)
    return by_inputs, {name: w.grad for name, w in leaves.items() if w.grad is not None}


def layers(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def draw(*shape: int, seed: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("schedule", RECOMPUTING, ids=str)
def test_a_recompute_takes_the_stored_input_and_the_weights_of_now(schedule: Schedule) -> None:
    block = make(layers(), schedule)
    x, g = draw(5, 6), draw(5, 6, seed=3)
    old = {name: p.detach().clone() for name, p in block.updater.parameters.items()}
    (sent,) = block.forward((0, 0), (x.clone(),))
    assert torch.equal(sent, functional_call(block.module, old, (x,)))
    assert not sent.requires_grad
    move(block)
    wanted_below, wanted = product(block.module, block.updater.parameters, (x,), (g,))
    block.recompute((0, 0))
    below = block.backward((0, 0), (g,))
    assert torch.equal(below[0], wanted_below[0])
    for name, p in block.updater.parameters.items():
        assert p.grad is not None
        assert torch.equal(p.grad, wanted[name])
    assert dict(block.staleness) == {1: 1}


@pytest.mark.parametrize("schedule", [PipeDream(), TwoBW(3)], ids=str)
def test_a_backward_is_at_the_weights_of_its_forward_where_they_are_stashed(schedule: Schedule) -> None:
    block = make(layers(), schedule)
    x, g = draw(5, 6), draw(5, 6, seed=3)
    old = {name: p.detach().clone() for name, p in block.updater.parameters.items()}
    block.forward((0, 0), (x,))
    move(block)
    assert not torch.equal(old["0.weight"], block.updater.parameters["0.weight"])
    wanted_below, wanted = product(block.module, old, (x,), (g,))
    (below,) = block.backward((0, 0), (g,))
    assert torch.equal(below, wanted_below[0])
    for name, p in block.updater.parameters.items():
        assert p.grad is not None
        assert torch.equal(p.grad, wanted[name])


def test_two_versions_are_those_before_and_after_the_last_update() -> None:
    block = make(layers(), TwoBW(3))
    versions = [{name: p.detach().clone() for name, p in block.updater.parameters.items()}]
    for n in range(4):
        x = draw(5, 6, seed=n)
        (sent,) = block.forward((n, 0), (x,))
        used = versions[max(0, n - 1)]
        assert torch.equal(sent, functional_call(block.module, used, (x,)))
        block.backward((n, 0), (draw(5, 6),))
        block.update()
        versions.append({name: p.detach().clone() for name, p in block.updater.parameters.items()})
    assert block.weights.most_kept == 2
    assert dict(block.staleness) == {0: 1, 1: 3}


def test_gradients_of_a_recompute_agree_with_finite_differences() -> None:
    module = layers().double()
    block = make(module, FR())
    x, g = draw(4, 6, dtype=torch.float64), draw(4, 6, seed=3, dtype=torch.float64)
    block.forward((0, 0), (x.clone(),))
    move(block)
    block.recompute((0, 0))
    (below,) = block.backward((0, 0), (g,))
    step = 1e-6

    def value(inputs: Tensor) -> float:
        with torch.no_grad():
            return float((module(inputs) * g).sum())

    weight = block.updater.parameters["0.weight"]
    assert weight.grad is not None
    for i, j in ((0, 0), (3, 5), (5, 2)):
        with torch.no_grad():
            weight[i, j] += step
            up = value(x)
            weight[i, j] -= 2 * step
            down = value(x)
            weight[i, j] += step
        assert float(weight.grad[i, j]) == pytest.approx((up - down) / (2 * step), abs=1e-7)
    nudge = torch.zeros_like(x)
    nudge[1, 4] = step
    assert float(below[1, 4]) == pytest.approx((value(x + nudge) - value(x - nudge)) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("schedule", RECOMPUTING + KEEPING, ids=str)
def test_a_first_layer_that_works_in_place_leaves_the_stored_input_alone(schedule: Schedule) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True))
    block = make(module, schedule)
    kept = dict(copy.deepcopy(module).named_parameters())
    for n in range(3):
        x, g = draw(5, 6, seed=n), draw(5, 6, seed=3)
        mine = x.clone()
        (sent,), (below,) = once(block, (n, 0), (mine,), (g,))
        (wanted_below,), _ = product(module, kept, (x,), (g,))
        assert torch.equal(mine, x)
        assert torch.equal(below, wanted_below)
        assert torch.equal(sent, copy.deepcopy(module)(x.clone()))
        move_nothing(block)


def move_nothing(block: Block) -> None:
    for parameter in block.updater.parameters.values():
        parameter.grad = None
    block.update()


def test_an_evaluation_before_the_first_step_does_not_hide_a_layer_in_place() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(6, 6))
    block = make(module, FR())
    x = draw(5, 6)
    mine = x.clone()
    block.evaluate((mine,))
    assert module.training
    once(block, (0, 0), (mine,), (draw(5, 6),))
    assert torch.equal(mine, x)


class TwoIn(nn.Module):
    """Takes tokens and a state, returns them and a count: several tensors, some of integers, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, tokens: Tensor, state: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed = torch.tanh(self.mix(self.embed(tokens).mean(1) + state))
        return tokens, mixed, mixed * 2


@pytest.mark.parametrize("schedule", RECOMPUTING + KEEPING, ids=str)
def test_several_tensors_and_integers_cross_a_boundary(schedule: Schedule) -> None:
    torch.manual_seed(0)
    module = TwoIn()
    block = make(module, schedule)
    tokens = torch.randint(7, (5, 3), generator=torch.Generator().manual_seed(0))
    state, unused, g, h = draw(5, 6), draw(5, 2), draw(5, 6, seed=4), draw(5, 6, seed=5)
    outputs, below = once(block, (0, 0), (tokens, state, unused), (g, h))
    assert [o.dtype for o in outputs] == [torch.int64, torch.float32, torch.float32]
    leaf = state.clone().requires_grad_()
    _, mixed, double = module(tokens, leaf, unused)
    torch.autograd.backward([mixed, double], [g, h])
    assert leaf.grad is not None
    assert len(below) == 2, "one for each input of floating point"
    assert torch.equal(below[0], leaf.grad)
    assert torch.equal(below[1], torch.zeros(5, 2))


def test_tokens_go_into_the_first_block_and_nothing_comes_back() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 6))
    for schedule in (*RECOMPUTING[:3], *KEEPING):
        block = make(copy.deepcopy(module), schedule, 0)
        tokens = torch.tensor([[0, 1, 2], [3, 3, 3]])
        _, below = once(block, (0, 0), (tokens,), (draw(2, 6),))
        assert below == ()
        assert all(p.grad is not None for p in block.updater.parameters.values())


@pytest.mark.parametrize("schedule", [*RECOMPUTING, *KEEPING], ids=str)
def test_dropout_is_the_same_in_forward_and_recompute_and_has_a_stream_of_its_own(schedule: Schedule) -> None:
    torch.manual_seed(0)
    keeps = nn.Linear(6, 6, bias=False)
    nn.init.eye_(keeps.weight)
    module = nn.Sequential(nn.Dropout(0.5), keeps)
    g = torch.ones(40, 6)
    results = []
    for user_seed in (1, 2):
        block = make(copy.deepcopy(module), schedule)
        torch.manual_seed(user_seed)
        before = torch.get_rng_state()
        masks = []
        for n in (0, 1, 2):
            (sent,), (below,) = once(block, (n, 0), (torch.ones(40, 6),), (g,))
            assert torch.equal(sent != 0, below != 0), "the units that are dropped are the same in both passes"
            masks.append(sent)
            move_nothing(block)
        assert torch.equal(torch.get_rng_state(), before), "the user's stream is where it was"
        assert not torch.equal(masks[0], masks[1])
        results.append(masks)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "whatever the user draws"


def test_random_numbers_differ_by_block_batch_micro_batch_and_seed() -> None:
    def mask(number: int, key: tuple[int, int], seed: int) -> Tensor:
        block = make(nn.Sequential(nn.Dropout(0.5)), FR(), number, blocks=4, seed=seed)
        return block.forward(key, (torch.ones(50, 6),))[0]

    masks = [mask(1, (3, 0), 0), mask(2, (3, 0), 0), mask(1, (4, 0), 0), mask(1, (3, 1), 0), mask(1, (3, 0), 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert torch.equal(masks[0], mask(1, (3, 0), 0))


def test_a_model_of_one_block_draws_as_plain_training_does() -> None:
    module = nn.Sequential(nn.Dropout(0.5))
    torch.manual_seed(4)
    wanted = module(torch.ones(5, 6))
    torch.manual_seed(4)
    (found,) = make(module, BP(), 0, blocks=1).forward((0, 0), (torch.ones(5, 6),))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("running_stats", ["recompute", "forward"])
@pytest.mark.parametrize("schedule", [*RECOMPUTING, *KEEPING], ids=str)
def test_running_statistics_see_each_batch_once(schedule: Schedule, running_stats: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    block = make(module, schedule, running_stats=running_stats)
    norm = module[1]
    assert isinstance(norm, nn.BatchNorm1d)
    twin = copy.deepcopy(module)
    x = draw(9, 6)
    block.forward((0, 0), (x,))
    twin(x)
    early = block._keeps_graph or running_stats == "forward"
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == (1 if early else 0)
    if not block._keeps_graph:
        block.recompute((0, 0))
    block.backward((0, 0), (draw(9, 6),))
    assert int(norm.num_batches_tracked) == 1
    for name, value in twin.named_buffers():
        assert torch.equal(value, dict(module.named_buffers())[name])


def test_running_statistics_of_a_recompute_are_those_of_the_weights_of_now() -> None:
    found = {}
    for running_stats in ("recompute", "forward"):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(6)
        module = nn.Sequential(nn.Linear(6, 6), norm)
        block = make(module, FR(), running_stats=running_stats)
        x = draw(9, 6)
        old = copy.deepcopy(module)
        block.forward((0, 0), (x,))
        old(x)
        move(block)
        new = copy.deepcopy(module)
        new(x)
        block.recompute((0, 0))
        block.backward((0, 0), (draw(9, 6),))
        wanted = dict((new if running_stats == "recompute" else old).named_buffers())
        assert norm.running_mean is not None
        assert torch.equal(norm.running_mean, wanted["1.running_mean"])
        found[running_stats] = norm.running_mean
    assert not torch.equal(found["recompute"], found["forward"])


def test_evaluation_uses_the_running_statistics_of_the_module_and_keeps_nothing() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    block = make(module, FR())
    once(block, (0, 0), (draw(9, 6),), (draw(9, 6),))
    state = copy.deepcopy(module.state_dict())
    (found,) = block.evaluate((draw(2, 6),))
    wanted = copy.deepcopy(module).eval()(draw(2, 6))
    assert torch.equal(found, wanted)
    assert not found.requires_grad
    assert module.training
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("schedule", [FR(), FR(overlaps=False), BP()], ids=str)
def test_bfloat16_autocast_runs_forward_recompute_and_loss(schedule: Schedule) -> None:
    block = make(layers(), schedule, autocast=torch.bfloat16)
    x, g = draw(5, 6), draw(5, 6, seed=3).bfloat16()
    (sent,), (below,) = once(block, (0, 0), (x,), (g,))
    assert sent.dtype == torch.bfloat16
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = block.module(leaf)
    wanted.backward(g)
    assert leaf.grad is not None
    assert torch.equal(sent, wanted)
    assert torch.equal(below, leaf.grad)
    assert block.updater.parameters["0.weight"].grad is not None
    assert block.updater.parameters["0.weight"].grad.dtype == torch.float32


class Meeting(nn.Module):
    """Its forward with a graph runs in the middle of one without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.armed = False
        self.cast, self.done = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and torch.is_grad_enabled():
            self.cast.wait(10)
            try:
                return torch.as_tensor(self.layer(x))
            finally:
                self.done.set()
        out = torch.as_tensor(self.layer(x))
        if self.armed:
            self.cast.set()
            self.done.wait(10)
        return out


def test_a_recompute_beside_a_forward_has_gradients_under_autocast() -> None:
    module = Meeting()
    block = make(module, FR(), autocast=torch.bfloat16)
    block.forward((0, 0), (draw(5, 6),))
    module.armed = True
    block.recompute((0, 0))
    block.forward((1, 0), (draw(5, 6),))
    block.backward((0, 0), (draw(5, 6).bfloat16(),))
    assert module.done.is_set(), "they ran side by side"
    assert module.layer.weight.grad is not None


def test_a_recompute_that_raises_says_so_at_the_backward() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise ValueError("no second time")
            return x * 1

    block = make(Fails(), FR())
    block.forward((0, 0), (draw(5, 6),))
    block.recompute((0, 0))
    with pytest.raises(ValueError, match="no second time"):
        block.backward((0, 0), (draw(5, 6),))


@pytest.mark.parametrize("schedule", [*RECOMPUTING, *KEEPING], ids=str)
def test_a_block_without_parameters_and_one_with_frozen_ones_pass_gradients_on(schedule: Schedule) -> None:
    g = draw(5, 6, seed=3)
    (_, (below,)) = once(make(nn.Sequential(nn.Tanh()), schedule), (0, 0), (draw(5, 6),), (g,))
    assert torch.equal(below, product(nn.Sequential(nn.Tanh()), {}, (draw(5, 6),), (g,))[0][0])

    half = layers()
    half.get_submodule("0").requires_grad_(False)
    frozen = dict(copy.deepcopy(half).named_parameters())
    block = make(half, schedule)
    (_, (below,)) = once(block, (0, 0), (draw(5, 6),), (g,))
    assert torch.equal(below, product(half, frozen, (draw(5, 6),), (g,))[0][0])
    assert set(block.updater.parameters) == {"2.weight", "2.bias"}
    block.update()
    assert torch.equal(half.get_parameter("0.weight"), frozen["0.weight"])
    assert not torch.equal(half.get_parameter("2.weight"), frozen["2.weight"])

    first = make(layers().requires_grad_(False), schedule, 0)
    assert once(first, (0, 0), (draw(5, 6),), (g,))[1] == ()
    first.update()


@pytest.mark.parametrize("schedule", [BP(), FR(), PipeDream()], ids=str)
def test_a_parameter_that_a_batch_does_not_use_has_no_gradient(schedule: Schedule) -> None:
    module = nn.Sequential(nn.Linear(6, 6))
    module.register_parameter("idle", nn.Parameter(torch.ones(3)))
    block = make(module, schedule)
    once(block, (0, 0), (draw(5, 6),), (draw(5, 6),))
    assert module.idle.grad is None
    block.update()
    assert torch.equal(module.idle, torch.ones(3))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"x": 1}, r"block 1 returns \(dict\): a block has to return tensors"),
        (None, r"block 1 returns \(NoneType\)"),
        ((torch.ones(2), 3), r"block 1 returns \(Tensor, int\)"),
        ((), r"block 1 returns \(\)"),
    ],
)
def test_a_block_that_does_not_return_tensors_is_refused(returned: object, says: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> object:
            return returned

    with pytest.raises(ConfigError, match=says):
        make(Odd(), BP()).forward((0, 0), (draw(5, 6),))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_training(bad: float) -> None:
    block = make(nn.Linear(6, 3), BP(), 2)
    block.forward((0, 0), (torch.full((5, 6), bad),))
    with pytest.raises(NonFiniteError, match="the loss is nan: training diverged; lower the learning rate"):
        block.backward((0, 0), (torch.zeros(5, dtype=torch.int64),))


def test_the_last_block_computes_the_loss_of_its_labels() -> None:
    torch.manual_seed(0)
    block = make(nn.Linear(6, 3), BP(), 2, scale=8.0)
    x, y = draw(5, 6), torch.tensor([0, 1, 2, 0, 1])
    (below,) = once(block, (0, 0), (x,), (y,))[1]
    leaf = x.clone().requires_grad_()
    loss = loss_of(block.module(leaf), y)
    loss.backward()
    assert list(block.losses) == [float(loss.detach())], "as the user knows it, not scaled"
    assert leaf.grad is not None
    assert torch.allclose(below, 8 * leaf.grad), "error gradients travel scaled"


def test_of_a_long_run_only_the_latest_losses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalempi.pipeline.block._LOSSES", 3)
    block = make(nn.Linear(6, 3), GPipe(2), 2)
    for batch in range(5):
        for micro, samples in ((0, 3), (1, 1)):
            once(block, (batch, micro), (draw(samples, 6),), (torch.zeros(samples, dtype=torch.int64),))
    assert len(block.losses) == 3
    assert block._parts == []


def test_which_pass_updates_running_statistics_is_checked() -> None:
    with pytest.raises(ConfigError, match="running_stats must be 'recompute' or 'forward', got 'both'"):
        make(layers(), FR(), running_stats="both")


def test_samples_are_counted_by_the_inputs_where_an_output_is_flattened() -> None:
    block = make(nn.Sequential(nn.Linear(6, 3), nn.Flatten(0, 1)), BP(), 2)
    once(block, (0, 0), (draw(5, 4, 6),), (torch.zeros(20, dtype=torch.int64),))
    block.update()
    assert block.updater.samples == 5


@pytest.mark.parametrize("schedule", RECOMPUTING)
def test_loaded_buffers_reach_the_forward_and_the_recompute(schedule: Schedule) -> None:
    class Shift(nn.Module):
        by: Tensor

        def __init__(self, by: float) -> None:
            super().__init__()
            self.register_buffer("by", torch.tensor(by))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.by

    block = make(nn.Sequential(nn.Identity(), Shift(1.0)), schedule)
    block.load(nn.Sequential(nn.Identity(), Shift(5.0)).state_dict())
    assert block.forward((0, 0), (torch.zeros(2, 3),))[0].tolist() == [[5.0] * 3] * 2
    block.recompute((0, 0))
    block._settle((0, 0))
    outputs = block._held[0, 0].outputs
    assert outputs is not None
    assert outputs[0].tolist() == [[5.0] * 3] * 2
