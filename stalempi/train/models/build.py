"""Finds the network that a name means and makes sure that it fits the images."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial

import torch
import torchvision
from torch import Tensor, nn
from torch.func import functional_call

from stalempi.errors import ConfigError
from stalempi.train.models.resnet import cifar_resnet, resnet50_small
from stalempi.train.models.small import Shape, alexnet_small, cnn, mlp

__all__ = ["MODELS", "build_model", "check_model_name"]

MODELS: dict[str, Callable[[int, Shape], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "alexnet-small": alexnet_small,
    "resnet20": partial(cifar_resnet, 20),
    "resnet32": partial(cifar_resnet, 32),
    "resnet56": partial(cifar_resnet, 56),
    "resnet110": partial(cifar_resnet, 110),
    "resnet50": resnet50_small,
}
TORCHVISION = "torchvision:"
SMALL = 64  # pixels; up to here resnet50 keeps the full resolution in its first layers
TWO_HEADED = ("googlenet", "inception_v3")  # their auxiliary outputs would make training return tuples


def build_model(name: str, *, num_classes: int, input_shape: Shape) -> nn.Module:
    """Builds the network `name` for images of `input_shape` (C, H, W), initialised from torch's global generator.

    Names of our own come first: those in MODELS, all of them `nn.Sequential`. Every other name is torchvision's, and
    `torchvision:NAME` is torchvision's in any case. The one name in both is resnet50: ours up to 64 pixels a side,
    torchvision's above.

    Raises ConfigError for an unknown name, or if the network does not map such images to `num_classes` numbers.
    """
    if min(num_classes, *input_shape) < 1:
        raise ConfigError(f"num_classes={num_classes}, input_shape={tuple(input_shape)}: give classes and (C, H, W)")
    check_model_name(name)
    bare = name.removeprefix(TORCHVISION)
    theirs = name not in MODELS or (name == "resnet50" and max(input_shape[1:]) > SMALL)
    try:
        model = _torchvision(bare, num_classes) if theirs else MODELS[name](num_classes, input_shape)
        outputs = _output_shape(model, input_shape)
    except (RuntimeError, ValueError, AssertionError) as failure:
        reason = (str(failure).splitlines() or [type(failure).__name__])[0]
        raise ConfigError(_misfit(name, input_shape, reason)) from failure
    if outputs != (2, num_classes):
        raise ConfigError(_misfit(name, input_shape, f"its output for two images is {outputs}"))
    return model


def check_model_name(name: str) -> None:
    """Raises ConfigError, with names that come close, if `build_model` knows no model called `name`."""
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in MODELS and name.removeprefix(TORCHVISION) not in known:
        raise ConfigError(_unknown(name, known))


def _torchvision(name: str, num_classes: int) -> nn.Module:
    options = {"aux_logits": False, "init_weights": True} if name in TWO_HEADED else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
    return model


def _output_shape(model: nn.Module, input_shape: Shape) -> tuple[int, ...]:
    """Computes what two images become, on the meta device: shapes only, no arithmetic, no change to the model."""
    state = {name: value.to("meta") for name, value in [*model.named_parameters(), *model.named_buffers()]}
    training = model.training
    outputs: Tensor = functional_call(model.eval(), state, torch.empty(2, *input_shape, device="meta"))
    model.train(training)
    return tuple(outputs.shape)


def _unknown(name: str, known: list[str]) -> str:
    close = get_close_matches(name.removeprefix(TORCHVISION), [*MODELS, *known], n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(MODELS)} or torchvision's"
    return f"unknown model {name!r}: {hint}"


def _misfit(name: str, input_shape: Shape, reason: str) -> str:
    shape = "x".join(map(str, input_shape))
    return f"model {name!r} does not fit images of {shape} ({reason}): take cnn or mlp, or other images"
