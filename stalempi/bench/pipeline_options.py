"""Holds what the user of stalempi-bench pipeline asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import stalempi
from stalempi.bench.choice import Choice
from stalempi.bench.metrics import check_board
from stalempi.bench.pace import BlockPace
from stalempi.bench.recipe import Recipe
from stalempi.errors import ConfigError
from stalempi.pipeline.schedules import Schedule
from stalempi.roles import assign_block
from stalempi.train.keeper import Checkpoint

__all__ = ["PipelineOptions"]

_PRECISIONS = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PipelineOptions:
    """What the user asked for; see the command's help."""

    method: Callable[[int], Schedule]
    choice: Choice
    recipe: Recipe
    replicas: int
    split: tuple[int, ...] | tuple[str, ...] | None
    meta: bool
    epochs: int
    samples: int | None
    batch_size: int
    running_stats: str
    loss_scale: float
    device: str | None
    slow: tuple[str, ...]
    pace: Callable[[int], BlockPace]
    evaluate_every: int | None
    stall_timeout: float | None
    checkpoint: Checkpoint | None
    grace: float
    trace: Path | None
    log_interval: float
    log_level: str | None
    metrics: Path | None
    tensorboard: Path | None
    out: Path | None

    def report(self) -> dict[str, Any]:
        """Returns the options as result.json holds them."""
        left_out = ("method", "choice", "recipe", "pace", "checkpoint")
        plain = {key: value for key, value in self.__dict__.items() if key not in left_out}
        plain |= {"checkpoint": str(self.checkpoint) if self.checkpoint else None}
        plain |= asdict(self.choice) | asdict(self.recipe)
        return {key: str(value) if isinstance(value, Path) else value for key, value in plain.items()}

    def __post_init__(self) -> None:
        if self.tensorboard is not None:
            check_board()

    def check(self, ranks: int) -> None:
        """Raises ConfigError for what cannot be with so many ranks, as far as can be known before they are started."""
        if ranks % self.replicas:
            raise ConfigError(f"-n {ranks} ranks do not divide into {self.replicas} replicas")
        blocks = ranks // self.replicas
        assign_block(0, ranks, blocks)
        parts = self.method(blocks).micro_batches
        if self.batch_size < parts:
            raise ConfigError(
                f"--batch-size {self.batch_size} cannot be cut into {parts} micro-batches: make it larger, or "
                "--micro-batches smaller"
            )
        self.pace(blocks)
        if self.split is not None and len(self.split) != blocks - 1:
            raise ConfigError(f"--split has {len(self.split)} cuts for {blocks} block(s): give one less than blocks")

    def block_options(self, total: int) -> stalempi.BlockOptions:
        """Returns how the blocks of a run of `total` global samples compute and are updated."""
        recipe = self.recipe
        update = stalempi.UpdateOptions(
            clip_norm=recipe.clip_norm,
            clip_value=recipe.clip_value,
            loss_scale=self.loss_scale if recipe.amp == "fp16" else 1.0,
            schedule=recipe.factor(total, 1),
        )
        autocast = _PRECISIONS[recipe.amp]
        return stalempi.BlockOptions(self.running_stats, autocast, self.choice.seed, update)
