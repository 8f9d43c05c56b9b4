"""Says what each block does next, for every method: a stream of actions per block (law 5).

A block's step n takes in batch n; `drain` finishes the batches that are still inside. The streams of neighbours only
have to agree on the order of messages, so no step waits for a step of another block but through these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stalempi.errors import ConfigError
from stalempi.pipeline.actions import Action, Op
from stalempi.pipeline.queues import check_queues

__all__ = [
    "BP",
    "DDG",
    "DNI",
    "DSP",
    "FR",
    "METHODS",
    "Delayed",
    "GPipe",
    "OneForwardOneBackward",
    "PipeDream",
    "Schedule",
    "TwoBW",
    "make_schedule",
]


class Schedule(ABC):
    """How a method works on batches, block by block.

    Attributes:
        name: the method's, in lower case.
        micro_batches: parts that a batch is cut into; 1: none.
        recomputes: whether a block stores only its input and computes the forward again before the backward.
        stashes: whether a block's backward uses the weights that its forward used, kept until then.
        overlaps: whether a recompute runs beside the forward of newer data.
        predicts: whether a block updates with a predicted error gradient.
        accumulate: batches whose gradients make one update.
        two_versions: whether a batch uses the weights before the update of the batch before it.
    """

    name: str
    micro_batches: int = 1
    recomputes: bool = False
    stashes: bool = False
    overlaps: bool = False
    predicts: bool = False
    accumulate: int = 1
    two_versions: bool = False

    def check(self, blocks: int) -> None:
        """Raises ConfigError if it cannot be had on `blocks` blocks."""
        if blocks < 1:
            raise ConfigError(f"a pipeline needs at least 1 block, got {blocks}")

    @abstractmethod
    def step(self, block: int, blocks: int, n: int) -> list[Action]:
        """Returns what `block` does in its step `n`, in which batch `n` comes in."""

    @abstractmethod
    def drain(self, block: int, blocks: int, count: int) -> list[Action]:
        """Returns what is left to do once `count` batches have come in and no more will."""

    @abstractmethod
    def delay(self, block: int, blocks: int) -> int:
        """Returns how many batches come in between the forward and the backward of one, in the steady state."""

    def staleness(self, block: int, blocks: int) -> int:
        """Returns the updates between the weights of a batch's forward and of its backward, in the steady state.

        With `accumulate` it is the most that a batch has.
        """
        return -(-self.delay(block, blocks) // self.accumulate)

    def keeps_graph(self, block: int, blocks: int) -> bool:
        """Returns whether the forward of `block` keeps what its backward needs, so that there is no recompute."""
        del block, blocks
        return not self.recomputes

    def stream(self, block: int, blocks: int, count: int) -> Iterator[Action]:
        """Yields everything that `block` does with `count` batches."""
        for n in range(count):
            yield from self.step(block, blocks, n)
        yield from self.drain(block, blocks, count)

    def __str__(self) -> str:
        return self.name


def _forward(block: int, blocks: int, batch: int, micro: int | None = None) -> list[Action]:
    before = [Op.RECEIVE_ACTIVATION] if block > 0 else []
    after = [Op.SEND_ACTIVATION] if block < blocks - 1 else []
    return [Action(op, batch, micro) for op in (*before, Op.FORWARD, *after)]


def _backward(block: int, blocks: int, batch: int, micro: int | None = None) -> list[Action]:
    before = [Op.RECEIVE_GRADIENT] if block < blocks - 1 else []
    after = [Op.SEND_GRADIENT] if block > 0 else []
    return [Action(op, batch, micro) for op in (*before, Op.BACKWARD, *after)]


@dataclass(frozen=True)
class _Synchronous(Schedule):
    """Cuts a batch into micro-batches and makes one update when all their gradients are in; nothing is stale."""

    micro_batches: int = 4

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ConfigError(f"{self.name} needs at least 1 micro-batch, got {self.micro_batches}")

    def drain(self, block: int, blocks: int, count: int) -> list[Action]:
        del block, blocks, count
        return []

    def delay(self, block: int, blocks: int) -> int:
        del block, blocks
        return 0

    def __str__(self) -> str:
        return f"{self.name}({self.micro_batches})"


@dataclass(frozen=True)
class GPipe(_Synchronous):
    """All forwards, then all backwards with recompute, last micro-batch first; bubble (K-1) / (M+K-1)."""

    name = "gpipe"
    recomputes = True

    def step(self, block: int, blocks: int, n: int) -> list[Action]:
        actions = [a for i in range(self.micro_batches) for a in _forward(block, blocks, n, i)]
        for i in reversed(range(self.micro_batches)):
            actions += [Action(Op.RECOMPUTE, n, i), *_backward(block, blocks, n, i)]
        return [*actions, Action(Op.UPDATE, n)]


@dataclass(frozen=True)
class OneForwardOneBackward(_Synchronous):
    """One forward, one backward in turn after K-1-k forwards; the pipe is emptied at every update."""

    name = "1f1b"

    def step(self, block: int, blocks: int, n: int) -> list[Action]:
        total = self.micro_batches
        ahead = min(blocks - 1 - block, total)
        actions = [a for i in range(ahead) for a in _forward(block, blocks, n, i)]
        for i in range(total):
            if i + ahead < total:
                actions += _forward(block, blocks, n, i + ahead)
            actions += _backward(block, blocks, n, i)
        return [*actions, Action(Op.UPDATE, n)]


class Delayed(Schedule):
    """In each step: the forward of a new batch, the backward of one that came in `delay` steps ago, an update."""

    def step(self, block: int, blocks: int, n: int) -> list[Action]:
        old = n - self.delay(block, blocks)
        recompute = self._recompute(block, blocks, old)
        forward = _forward(block, blocks, n)
        return (
            (recompute if self.overlaps else [])
            + forward
            + ([] if self.overlaps else recompute)
            + self._finish(block, blocks, old, last=False)
        )

    def drain(self, block: int, blocks: int, count: int) -> list[Action]:
        actions: list[Action] = []
        for old in range(max(0, count - self.delay(block, blocks)), count):
            actions += self._recompute(block, blocks, old)
            actions += self._finish(block, blocks, old, last=old == count - 1)
        if self.delay(block, blocks) == 0 and count % self.accumulate:
            actions.append(Action(Op.UPDATE, count - 1))
        return actions

    def keeps_graph(self, block: int, blocks: int) -> bool:
        return not self.recomputes or self.delay(block, blocks) == 0

    def _recompute(self, block: int, blocks: int, old: int) -> list[Action]:
        return [] if old < 0 or self.keeps_graph(block, blocks) else [Action(Op.RECOMPUTE, old)]

    def _finish(self, block: int, blocks: int, old: int, *, last: bool) -> list[Action]:
        if old < 0:
            return []
        update = last or (old + 1) % self.accumulate == 0
        return _backward(block, blocks, old) + ([Action(Op.UPDATE, old)] if update else [])


def _check_accumulate(accumulate: int) -> None:
    if accumulate < 1:
        raise ConfigError(f"accumulate must be at least 1 batch, got {accumulate}")


@dataclass(frozen=True)
class BP(Delayed):
    """Plain backpropagation through blocks: one batch at a time, nothing overlaps, nothing is stale."""

    name = "bp"
    accumulate: int = 1

    def __post_init__(self) -> None:
        _check_accumulate(self.accumulate)

    def delay(self, block: int, blocks: int) -> int:
        del block, blocks
        return 0


@dataclass(frozen=True)
class _Descending(Delayed):
    """The lower the block, the later its backward: K-1-k steps after the forward, once the error gradient is there."""

    accumulate: int = 1

    def __post_init__(self) -> None:
        _check_accumulate(self.accumulate)

    def delay(self, block: int, blocks: int) -> int:
        return blocks - 1 - block


@dataclass(frozen=True)
class PipeDream(_Descending):
    """1F1B without a flush, each batch's backward at the weights of its forward (weight stashing)."""

    name = "pipedream"
    stashes = True


@dataclass(frozen=True)
class DDG(PipeDream):
    """Decoupled parallel backpropagation: stored graphs, K-1-k steps old.

    Its graphs hold the weights of their forward, and each step takes in a batch, then finishes one: so its updates are
    those of PipeDream. The original's forward pass is one sweep through all blocks; here it is pipelined.
    """

    name = "ddg"


@dataclass(frozen=True)
class FR(_Descending):
    """Features Replay: as DSP with p = 0 and m_k = K-1-k."""

    name = "fr"
    recomputes = True
    overlaps: bool = True


@dataclass(frozen=True)
class DSP(Delayed):
    """Diversely Stale Parameters (arXiv 1909.02625): see `stalempi.pipeline.queues`.

    Args:
        p: outputs on their way from each block, p_{K-1} = 0.
        m: inputs waiting in each block; its staleness.
        overlaps: recompute beside the forward of newer data.
        accumulate: batches whose gradients make one update; the staleness in updates falls to ceil(m_k / accumulate).

    Raises ConfigError if Eq. 6 does not hold.
    """

    p: tuple[int, ...]
    m: tuple[int, ...]
    overlaps: bool = True
    accumulate: int = 1
    name = "dsp"
    recomputes = True

    def __post_init__(self) -> None:
        check_queues(self.p, self.m)
        _check_accumulate(self.accumulate)

    def check(self, blocks: int) -> None:
        super().check(blocks)
        if blocks != len(self.m):
            raise ConfigError(f"{self} is for {len(self.m)} block(s), but there are {blocks}: give p and m one a block")

    def delay(self, block: int, blocks: int) -> int:
        del blocks
        return self.m[block]

    def __str__(self) -> str:
        return f"dsp({','.join(map(str, self.p))};{','.join(map(str, self.m))})"


@dataclass(frozen=True)
class TwoBW(Schedule):
    """PipeDream-2BW: w(t+1) = w(t) - lr grad f(w(t-1)), two weight versions, one 1F1B through all micro-batches."""

    name = "2bw"
    stashes = True
    two_versions = True
    micro_batches: int = 4

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ConfigError(f"2bw needs at least 1 micro-batch, got {self.micro_batches}")

    def check(self, blocks: int) -> None:
        super().check(blocks)
        if self.micro_batches < blocks:
            raise ConfigError(
                f"2bw keeps two versions of the weights, so it needs at least as many micro-batches as blocks: "
                f"{self.micro_batches} for {blocks}"
            )

    def delay(self, block: int, blocks: int) -> int:
        del block
        return min(1, blocks - 1)  # a single block has the new weights at once

    def step(self, block: int, blocks: int, n: int) -> list[Action]:
        ahead, actions = blocks - 1 - block, list[Action]()
        for i in range(self.micro_batches):
            actions += _forward(block, blocks, n, i)
            actions += self._finish(block, blocks, n * self.micro_batches + i - ahead)
        return actions

    def drain(self, block: int, blocks: int, count: int) -> list[Action]:
        total = count * self.micro_batches
        rest = range(max(0, total - (blocks - 1 - block)), total)
        return [action for place in rest for action in self._finish(block, blocks, place)]

    def _finish(self, block: int, blocks: int, place: int) -> list[Action]:
        if place < 0:
            return []
        batch, micro = divmod(place, self.micro_batches)
        update = [Action(Op.UPDATE, batch)] if micro == self.micro_batches - 1 else []
        return _backward(block, blocks, batch, micro) + update

    def __str__(self) -> str:
        return f"{self.name}({self.micro_batches})"


@dataclass(frozen=True)
class DNI(Schedule):
    """Decoupled neural interfaces: a block updates at once with a predicted error gradient.

    The error gradient that the block above computes, from its own prediction, teaches the predictor one step later.
    """

    name = "dni"
    predicts = True

    def delay(self, block: int, blocks: int) -> int:
        del block, blocks
        return 0

    def step(self, block: int, blocks: int, n: int) -> list[Action]:
        actions = _forward(block, blocks, n)
        actions += [Action(Op.PREDICT, n)] if block < blocks - 1 else []
        actions += [Action(Op.BACKWARD, n)]
        actions += [Action(Op.SEND_GRADIENT, n)] if block > 0 else []
        return [*actions, Action(Op.UPDATE, n), *self._teach(block, blocks, n - 1)]

    def drain(self, block: int, blocks: int, count: int) -> list[Action]:
        return self._teach(block, blocks, count - 1)

    def _teach(self, block: int, blocks: int, batch: int) -> list[Action]:
        if batch < 0 or block == blocks - 1:
            return []
        return [Action(Op.RECEIVE_GRADIENT, batch), Action(Op.TRAIN, batch)]


METHODS: dict[str, type[Schedule]] = {
    method.name: method for method in (BP, GPipe, OneForwardOneBackward, PipeDream, TwoBW, DDG, FR, DNI, DSP)
}


def make_schedule(
    name: str,
    *,
    p: Sequence[int] | None = None,
    m: Sequence[int] | None = None,
    micro_batches: int | None = None,
    accumulate: int = 1,
    overlaps: bool = True,
) -> Schedule:
    """Returns the schedule called `name`; ConfigError if it is unknown or does not take an option given."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}: choose one of {', '.join(METHODS)}")
    if name != "dsp" and (p is not None or m is not None):
        raise ConfigError(f"method {name} has no queue lengths: p and m are for dsp")
    if micro_batches is not None and name not in ("gpipe", "1f1b", "2bw"):
        raise ConfigError(f"method {name} has no micro-batches: they are for gpipe, 1f1b and 2bw")
    if not overlaps and name not in ("fr", "dsp"):
        raise ConfigError(f"method {name} recomputes beside no forward: to do so in line is for fr and dsp")
    if accumulate != 1 and not issubclass(METHODS[name], Delayed):
        raise ConfigError(f"method {name} does not accumulate batches: take more micro-batches instead")
    if name == "dsp":
        if p is None or m is None:
            raise ConfigError("dsp needs its queue lengths, one a block, as in p=1,1,0 m=4,2,0")
        return DSP(tuple(p), tuple(m), overlaps, accumulate)
    if name == "fr":
        return FR(overlaps=overlaps, accumulate=accumulate)
    if micro_batches is not None:
        return METHODS[name](micro_batches)  # type: ignore[call-arg]
    return METHODS[name](accumulate=accumulate) if accumulate != 1 else METHODS[name]()  # type: ignore[call-arg]
