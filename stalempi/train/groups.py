"""Puts parameters into groups with their own settings."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["decay_groups"]

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns parameter groups for a torch optimizer: weights decay, biases and what normalises do not.

    Without decay are parameters of at most one dimension, those called bias, and those of a normalisation layer. Every
    trainable parameter is in one group, a tied one by the place where it comes first. A group that would be empty is
    left out.
    """
    spared = {
        id(p) for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_spared = parameter.dim() < 2 or name.rpartition(".")[2] == "bias" or id(parameter) in spared
            (others if is_spared else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
