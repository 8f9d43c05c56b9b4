"""Names what a block can do, as values that print and parse: `F5`, `<B3`, `F5.2`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from stalempi.errors import ConfigError

__all__ = ["Action", "Op", "format_actions", "parse_actions"]


class Op(Enum):
    """One kind of work; the value is its text. `<` receives from a neighbour, `>` sends to one."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    UPDATE = "U"
    PREDICT = "P"  # DNI: guess the error gradient of this block's output
    TRAIN = "T"  # DNI: teach the guess by the error gradient that came
    RECEIVE_ACTIVATION = "<F"
    SEND_ACTIVATION = ">F"
    RECEIVE_GRADIENT = "<B"
    SEND_GRADIENT = ">B"
    STEP_TIE = "V"  # one optimizer step of the parameters that two blocks share
    RECEIVE_TIE = "<V"
    SEND_TIE = ">V"

    @property
    def is_receive(self) -> bool:
        """Whether it may have to wait for a neighbour."""
        return self in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT, Op.RECEIVE_TIE)

    @property
    def is_send(self) -> bool:
        """Whether it hands something to a neighbour."""
        return self in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT, Op.SEND_TIE)


_TEXT = re.compile(r"([<>]?[A-Z])([0-9]+)(?:\.([0-9]+))?")
_OPS = {op.value: op for op in Op}


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of a block's work.

    Attributes:
        op: what to do.
        batch: which batch it is for, from 0.
        micro: which micro-batch of it, from 0; None for the whole batch.
    """

    op: Op
    batch: int
    micro: int | None = None

    def __str__(self) -> str:
        return f"{self.op.value}{self.batch}" + ("" if self.micro is None else f".{self.micro}")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads what `str` wrote; ConfigError for anything else."""
        found = _TEXT.fullmatch(text)
        if not found or found[1] not in _OPS:
            raise ConfigError(f"{text!r} is no action: write {' '.join(_OPS)} and a batch, as in F5 or <B3.1")
        return cls(_OPS[found[1]], int(found[2]), None if found[3] is None else int(found[3]))


def format_actions(actions: Iterable[Action]) -> str:
    """Returns actions as words on one line."""
    return " ".join(map(str, actions))


def parse_actions(text: str) -> list[Action]:
    """Reads what `format_actions` wrote; ConfigError names the word that is none."""
    return [Action.parse(word) for word in text.split()]
