"""Turns a block that has no batch inside into plain values and back, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stalempi.errors import ConfigError
from stalempi.pipeline.predictor import Predictor
from stalempi.pipeline.runner import Runner
from stalempi.pipeline.update import Updater

__all__ = ["block_state", "check_same", "copy_state", "load_block"]


def check_same(path: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises ConfigError if a run is not what the one that wrote the checkpoint `path` was, with what differs of both.

    Args:
        path: named in the error.
        saved, ours: what has to be the same, by its name in words.
    """
    names = [name for name in {**ours, **saved} if saved.get(name) != ours.get(name)]
    if names:
        theirs, mine = (", ".join(f"{name} {each.get(name)}" for name in names) for each in (saved, ours))
        raise ConfigError(
            f"checkpoint {path} is of {theirs}, this run is of {mine}: resume it as it was, or start fresh"
        )


def block_state(runner: Runner) -> dict[str, Any]:
    """Returns weights, running statistics, optimizers and counts of a drained block, for `torch.save`."""
    assert runner.idle, "drained before"
    return {
        "module": runner.block.module.state_dict(),
        "updater": _updater_state(runner.block.updater),
        "tied": _updater_state(runner.tied.updater) if runner.tied else None,
        "predictor": _predictor_state(runner.predictor),
        "random": runner.block.random_state(),
        "batches": runner.batches,
    }


def copy_state(runner: Runner) -> dict[str, Any]:
    """Returns what a block of a later copy of the pipeline does not have in common with the first copy's."""
    state, parameters = block_state(runner), dict(runner.block.module.named_parameters(remove_duplicate=False))
    state["module"] = {key: value for key, value in state["module"].items() if key not in parameters}
    return {part: state[part] for part in ("module", "predictor", "random")}


def load_block(runner: Runner, state: dict[str, Any], own: dict[str, Any] | None = None) -> None:
    """Brings a block that has done nothing yet to where `block_state` found another one.

    Args:
        runner: of the block.
        state: of the first copy's.
        own: what `copy_state` returned, in a later copy of the pipeline.

    Raises ConfigError if that was a block of another model or method.
    """
    try:
        if own:
            state = {**state, **own, "module": {**state["module"], **own["module"]}}
        runner.block.load(state["module"])
        runner.block.set_random_state(state["random"])
        _load_updater(runner.block.updater, state["updater"])
        if runner.tied:
            _load_updater(runner.tied.updater, state["tied"])
        device = next((p.device for p in runner.block.module.parameters()), torch.device("cpu"))
        _load_predictor(runner.predictor, state["predictor"], device)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the checkpoint is of another model, optimizer or method ({reason})") from None
    runner.restart(int(state["batches"]))


def _updater_state(updater: Updater) -> dict[str, Any]:
    optimizer = updater.optimizer.state_dict() if updater.optimizer else None
    counts = {"updates": updater.updates, "samples": updater.samples, "skipped": updater.skipped}
    return {"optimizer": optimizer, **counts}


def _load_updater(updater: Updater, state: dict[str, Any]) -> None:
    if updater.optimizer:
        updater.optimizer.load_state_dict(state["optimizer"])
    updater.updates, updater.samples, updater.skipped = (int(state[k]) for k in ("updates", "samples", "skipped"))


def _predictor_state(predictor: Predictor | None) -> dict[str, Any] | None:
    if predictor is None or predictor.net is None or predictor.optimizer is None:
        return None
    return {
        "shape": list(predictor.shape),
        "net": predictor.net.state_dict(),
        "optimizer": predictor.optimizer.state_dict(),
        "mean_square": predictor.mean_square,
    }


def _load_predictor(predictor: Predictor | None, state: dict[str, Any] | None, device: torch.device) -> None:
    if predictor is None or state is None:
        return
    net, optimizer = predictor.build(torch.empty(state["shape"], device=device))
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    predictor.mean_square = float(state["mean_square"])
