"""A recipe says what an update stands for, how the rate goes, and which parameters decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stalempi.bench.recipe import recipe_from
from stalempi.errors import ConfigError
from stalempi.policy import ASP, BSP, DSSP, SSP, Policy

WORDS: dict[str, Any] = {
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "no_decay_norm": False,
    "schedule": "step",
    "lr_decay": None,
    "lr_decay_factor": 0.1,
    "warmup": 0.0,
    "scale_lr": False,
    "accumulate": 1,
    "clip_norm": None,
    "clip_value": None,
    "nonfinite": "raise",
    "amp": "off",
}


@pytest.mark.parametrize(
    ("policy", "accumulate", "batches"),
    [(BSP(), 1, 4), (BSP(backup=1), 1, 3), (BSP(), 2, 8), (ASP(), 1, 1), (SSP(3), 2, 2), (DSSP(1, 3), 1, 1)],
    ids=str,
)
def test_an_update_stands_for_all_workers_under_bsp_and_for_one_elsewhere(
    policy: Policy, accumulate: int, batches: int
) -> None:
    plain = recipe_from(WORDS | {"accumulate": accumulate})
    assert plain.batches_per_update(policy, 4) == batches
    assert plain.scale(policy, 4) == 1
    assert recipe_from(WORDS | {"accumulate": accumulate, "scale_lr": True}).scale(policy, 4) == batches


@pytest.mark.parametrize(
    ("words", "scale", "expected"),
    [
        ({}, 1, [1.0, 1.0, 1.0, 0.1, 0.01]),
        ({"lr_decay": "0.5", "lr_decay_factor": 0.5}, 1, [1.0, 1.0, 0.5, 0.5, 0.5]),
        ({"lr_decay": ""}, 1, [1.0] * 5),
        ({"schedule": "constant"}, 1, [1.0] * 5),
        ({"schedule": "cosine"}, 1, [1.0, 0.9045, 0.5, 0.2061, 0.0245]),
        ({"schedule": "constant", "warmup": 0.5}, 1, [0.1, 0.46, 1.0, 1.0, 1.0]),
        ({"schedule": "cosine", "warmup": 0.5}, 4, [0.25, 0.55, 1.0, 0.6545, 0.0955]),
    ],
    ids=str,
)
def test_the_rate_over_global_samples(words: dict[str, Any], scale: int, expected: list[float]) -> None:
    factor = recipe_from(WORDS | words).factor(1000, scale)
    assert [factor(at) for at in (0, 200, 500, 700, 900)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "words", [{"schedule": "cosine", "lr_decay": "0.5"}, {"lr_decay": "2"}, {"lr_decay": "half"}], ids=str
)
def test_what_does_not_fit_together_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lr-decay|shares"):
        recipe_from(WORDS | words)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_biases_are_spared_where_that_is_asked_for(kind: str) -> None:
    model = nn.Linear(3, 2)
    decays = []
    for spared in (False, True):
        optimizer = recipe_from(WORDS | {"optimizer": kind, "no_decay_norm": spared}).make_optimizer(model, 2)
        assert {group["lr"] for group in optimizer.param_groups} == {0.2}
        decays.append([group["weight_decay"] for group in optimizer.param_groups])
    assert decays == [[0.01], [0.01, 0.0]]


def test_half_precision_needs_a_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.amp, "GradScaler")
    with pytest.raises(ConfigError, match=r"torch 2.3 or later.*--amp bf16"):
        recipe_from(WORDS | {"amp": "fp16"})
