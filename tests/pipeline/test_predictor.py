"""DNI's guess: zero at first, taught by the right activation, the same for the same seed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.pipeline.predictor import Predictor, make_predictor

pytestmark = pytest.mark.usefixtures("one_thread")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5, 3), (5, 4, 3), (2, 3, 4, 4)])
def test_the_first_guess_is_zero_and_of_the_shape_of_the_activation(shape: tuple[int, ...]) -> None:
    predictor = Predictor(0)
    activation = draw(*shape)
    guess = predictor.predict(activation)
    assert guess.shape == activation.shape
    assert not guess.any()
    assert not guess.requires_grad
    predictor.train(draw(*shape, seed=1))
    assert predictor.predict(activation).any()


@pytest.mark.parametrize("shape", [(16, 3), (4, 3, 4, 4)])
def test_it_learns_a_gradient_that_is_a_function_of_the_activation_however_small(shape: tuple[int, ...]) -> None:
    predictor = Predictor(0, lr=1e-2)
    losses = []
    for n in range(120):
        activation = draw(*shape, seed=n % 10)
        wanted = 1e-5 * activation
        losses.append(float((predictor.predict(activation) - wanted).square().mean()) / 1e-10)
        predictor.train(wanted)
    assert losses[0] == pytest.approx(float(draw(*shape).square().mean()), rel=1e-4)
    assert sum(losses[-10:]) / 10 < 0.6 * sum(losses[:10]) / 10


def test_a_gradient_teaches_about_the_activation_that_it_is_of() -> None:
    """A step of DNI guesses for a batch before it is taught by the batch before it."""
    late, prompt = Predictor(7), Predictor(7)
    activations = [draw(5, 3, seed=n) for n in range(6)]
    errors = [draw(5, 3, seed=100 + n) for n in range(6)]
    late.predict(activations[0])
    for n in range(1, 6):
        late.predict(activations[n])
        late.train(errors[n - 1])
    for n in range(5):
        prompt.predict(activations[n])
        prompt.train(errors[n])
    assert late.net is not None
    assert prompt.net is not None
    for a, b in zip(late.net.parameters(), prompt.net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_batches_may_be_of_different_sizes() -> None:
    predictor = Predictor(0)
    predictor.predict(draw(5, 3))
    predictor.predict(draw(2, 3))
    predictor.train(draw(5, 3))
    predictor.train(draw(2, 3))


def test_its_update_is_a_step_of_adam_on_the_mean_square_error_in_units_of_the_gradient() -> None:
    activation, errors = draw(5, 3), draw(5, 3, seed=1)
    predictor = Predictor(3)
    predictor.predict(activation)
    predictor.train(errors)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = make_predictor(activation)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    size = math.sqrt(float(errors.square().mean()))
    ((net(activation) - errors / size) ** 2).mean().backward()
    optimizer.step()
    assert predictor.net is not None
    for a, b in zip(predictor.net.parameters(), net.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)
    assert torch.allclose(predictor.predict(activation), net(activation).detach() * size, atol=1e-7)


def test_its_first_weights_are_of_its_seed_and_do_not_move_the_users_stream() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    nets = [Predictor(seed).build(draw(5, 3))[0] for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    weights = [next(iter(net.parameters())) for net in nets]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_guesses_in_the_dtype_of_the_activation(dtype: torch.dtype) -> None:
    predictor = Predictor(0)
    activation = draw(5, 3).to(dtype)
    assert predictor.predict(activation).dtype == dtype
    predictor.train(draw(5, 3, seed=1).to(dtype))
    guess = predictor.predict(activation)
    assert guess.dtype == dtype
    assert guess.any()


def test_gradients_of_zero_and_those_that_overflowed_teach_nothing() -> None:
    predictor = Predictor(0)
    for bad in (0.0, math.inf, math.nan):
        predictor.predict(draw(5, 3))
        predictor.train(torch.full((5, 3), bad))
    assert predictor.mean_square == 0.0
    predictor.predict(draw(5, 3))
    predictor.train(draw(5, 3, seed=1))
    assert bool(torch.isfinite(predictor.predict(draw(5, 3))).all())


def test_what_has_no_batch_dimension_cannot_be_predicted() -> None:
    with pytest.raises(ConfigError, match=r"dni predicts gradients of activations with a batch dimension, got \(3,\)"):
        Predictor(0).predict(torch.ones(3))


def test_teaching_before_a_guess_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="a prediction comes first"):
        Predictor(0).train(torch.ones(2, 3))


def test_the_net_is_convolutional_for_images_only() -> None:
    for kind, shape in ((nn.Conv2d, (2, 3, 4, 4)), (nn.Linear, (2, 4, 3))):
        assert any(isinstance(layer, kind) for layer in make_predictor(torch.ones(shape)).modules())
