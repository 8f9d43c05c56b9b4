"""Finds the network that a name means and makes sure that it fits the data."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.func import functional_call

from stalempi.errors import ConfigError
from stalempi.train.models.preact import preact_basic, preact_bottleneck
from stalempi.train.models.resnet import cifar_resnet, resnet, resnext29
from stalempi.train.models.small import Shape, alexnet_small, cnn, mlp
from stalempi.train.models.transformer import Size, transformer
from stalempi.train.models.vgg import vgg19_small

__all__ = ["MODELS", "TEXT_MODELS", "build_model", "check_model_name"]

MODELS: dict[str, Callable[[int, Shape], nn.Sequential]] = {
    "mlp": mlp,
    "cnn": cnn,
    "alexnet-small": alexnet_small,
    "resnet11": partial(preact_bottleneck, 11),
    "resnet20": partial(cifar_resnet, 20),
    "resnet32": partial(cifar_resnet, 32),
    "resnet56": partial(cifar_resnet, 56),
    "resnet98": partial(preact_basic, 98),
    "resnet110": partial(cifar_resnet, 110),
    "resnet164": partial(preact_bottleneck, 164),
    "resnet50": partial(resnet, (3, 4, 6, 3)),
    "resnet101": partial(resnet, (3, 4, 23, 3)),
    "resnext29_2x64d": partial(resnext29, 2),
    "resnext29_8x64d": partial(resnext29, 8),
    "vgg19-small": vgg19_small,
}
TEXT_MODELS: dict[str, Callable[[int, tuple[int]], nn.Sequential]] = {
    "transformer-tiny": partial(transformer, Size(layers=2, width=32, heads=2)),
    "transformer-tiny-tied": partial(transformer, Size(layers=2, width=32, heads=2), tied=True),
    "transformer-small": partial(transformer, Size(layers=4, width=128, heads=4)),
    "transformer-small-tied": partial(transformer, Size(layers=4, width=128, heads=4), tied=True),
}
TORCHVISION = "torchvision:"
TWO_HEADED = ("googlenet", "inception_v3")  # their auxiliary outputs would make training return tuples


def build_model(name: str, *, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Builds the network `name`, initialised from torch's global generator.

    Names of our own come first: those in MODELS, for images, and in TEXT_MODELS, for text, all of them `nn.Sequential`.
    Every other name is torchvision's, and `torchvision:NAME` is torchvision's in any case.

    Args:
        name: of the network.
        num_classes: of images, or tokens in the vocabulary.
        input_shape: of one sample: (C, H, W) of an image, (T,) of a text.

    Raises ConfigError for an unknown name, or if the network does not map such samples to `num_classes` numbers each.
    """
    if min(num_classes, *input_shape) < 1 or len(input_shape) not in (1, 3):
        raise ConfigError(
            f"num_classes={num_classes}, input_shape={tuple(input_shape)}: give classes and (C, H, W), or (T,) of text"
        )
    check_model_name(name, text=len(input_shape) == 1)
    try:
        model = _build(name, num_classes, input_shape)
        outputs = _output_shape(model, input_shape)
    except (RuntimeError, ValueError, AssertionError) as failure:
        reason = (str(failure).splitlines() or [type(failure).__name__])[0]
        raise ConfigError(_misfit(name, input_shape, reason)) from failure
    if outputs != _wanted(num_classes, input_shape):
        raise ConfigError(_misfit(name, input_shape, f"its output for two images is {outputs}"))
    return model


def check_model_name(name: str, *, text: bool | None = None) -> None:
    """Raises ConfigError, with names that come close, if `build_model` knows no model called `name`.

    With `text` given it must also be for text, or for images.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in MODELS and name not in TEXT_MODELS and name.removeprefix(TORCHVISION) not in known:
        raise ConfigError(_unknown(name, known))
    if text is not None and text != (name in TEXT_MODELS):
        fits, data = (TEXT_MODELS, "text") if text else (MODELS, "images")
        raise ConfigError(f"model {name!r} is not for {data}: choose one of {', '.join(fits)}, or other data")


def _build(name: str, num_classes: int, input_shape: tuple[Any, ...]) -> nn.Module:
    if name in TEXT_MODELS:
        return TEXT_MODELS[name](num_classes, input_shape)
    if name in MODELS:
        return MODELS[name](num_classes, input_shape)
    return _torchvision(name.removeprefix(TORCHVISION), num_classes)


def _torchvision(name: str, num_classes: int) -> nn.Module:
    options = {"aux_logits": False, "init_weights": True} if name in TWO_HEADED else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
    return model


def _wanted(num_classes: int, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that two samples must become."""
    return (2, *input_shape, num_classes) if len(input_shape) == 1 else (2, num_classes)


def _output_shape(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Computes what two samples become, on the meta device: shapes only, no arithmetic, no change to the model."""
    state = {name: value.to("meta") for name, value in [*model.named_parameters(), *model.named_buffers()]}
    training = model.training
    dtype = torch.int64 if len(input_shape) == 1 else torch.float32
    samples = torch.empty(2, *input_shape, dtype=dtype, device="meta")
    outputs: Tensor = functional_call(model.eval(), state, samples)
    model.train(training)
    return tuple(outputs.shape)


def _unknown(name: str, known: list[str]) -> str:
    close = get_close_matches(name.removeprefix(TORCHVISION), [*MODELS, *TEXT_MODELS, *known], n=3)
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"choose one of {', '.join([*MODELS, *TEXT_MODELS])} or torchvision's"
    )
    return f"unknown model {name!r}: {hint}"


def _misfit(name: str, input_shape: tuple[int, ...], reason: str) -> str:
    shape = "x".join(map(str, input_shape))
    return f"model {name!r} does not fit images of {shape} ({reason}): take cnn or mlp, or other images"
