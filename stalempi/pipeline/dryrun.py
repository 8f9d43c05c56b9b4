"""Plays all blocks of a schedule against given costs before any tensor moves: deadlocks, staleness, queues, time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from stalempi.errors import ConfigError
from stalempi.pipeline.actions import Action, Op
from stalempi.pipeline.schedules import Schedule

__all__ = [
    "BlockCost",
    "Done",
    "DryRun",
    "LinkCost",
    "Slow",
    "draw",
    "link_depths",
    "period_of",
    "play",
    "play_actions",
]

_LOCAL = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.UPDATE, Op.PREDICT, Op.TRAIN)


@dataclass(frozen=True)
class BlockCost:
    """Seconds that a block takes for a whole batch, and what a batch leaves in its memory.

    Attributes:
        forward, recompute, backward, update: seconds.
        input_bytes: of the stored input of one batch.
        graph_bytes: of what a forward keeps for its backward.
        weight_bytes: of one version of the weights.
    """

    forward: float = 1.0
    recompute: float = 1.0
    backward: float = 2.0
    update: float = 0.0
    input_bytes: int = 0
    graph_bytes: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class LinkCost:
    """What a message of `nbytes` a batch takes between neighbours: latency (s) + bytes / bandwidth (bytes/s)."""

    latency: float = 0.0
    bandwidth: float = float("inf")
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """One action of one block, with its beginning and end in seconds."""

    block: int
    action: Action
    begin: float
    end: float


@dataclass
class DryRun:
    """What a schedule does.

    Attributes:
        timeline: every action in the order of its end on its block.
        seconds: when the last action ended.
        period: seconds a batch takes in the steady state: between the updates of block 0 from the middle of those
            that it makes while batches still come in to the last of them; 0 if these are fewer than two.
        bubble: share of all blocks' time in which they neither compute nor recompute.
        staleness: for each block the updates between forward and backward, and how many batches had so many.
        queue: for each link (k, k+1) the most activations, and the most error gradients, on their way at once.
        inputs, graphs: for each block the most of them kept at once, those of micro-batches if there are any.
        versions: of the weights, kept by each block.
        micro_batches: parts of a batch.
    """

    timeline: list[Done] = field(default_factory=list)
    seconds: float = 0.0
    period: float = 0.0
    bubble: float = 0.0
    staleness: list[Counter[int]] = field(default_factory=list)
    queue: list[tuple[int, int]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    micro_batches: int = 1

    def peak_bytes(self, costs: Sequence[BlockCost]) -> list[int]:
        """Returns for each block the bytes of stored inputs, graphs and weight versions at their most."""
        kept = zip(costs, self.inputs, self.graphs, self.versions, strict=True)
        parts = self.micro_batches
        return [-(-(c.input_bytes * i + c.graph_bytes * g) // parts) + c.weight_bytes * v for c, i, g, v in kept]


Slow = Callable[[int, int], float]
"""Factor of what a block does in a step, as slow(block, step)."""


def play(
    schedule: Schedule,
    blocks: int,
    batches: int,
    *,
    costs: Sequence[BlockCost] | None = None,
    link: LinkCost | None = None,
    slow: Slow | None = None,
) -> DryRun:
    """Plays `batches` batches of a schedule through `blocks` blocks.

    Args:
        schedule: the method.
        blocks: K.
        batches: how many come in before the pipe is drained.
        costs: of each block; F = R = 1, B = 2 by default.
        link: of every link; free by default.
        slow: factor of what a block does in a step, as `slow(block, step)`; its step n is from the forward of batch n,
            and the recompute beside it, until the next.

    Raises ConfigError if the schedule cannot be had on so many blocks, or deadlocks (it says who waits for what).
    """
    schedule.check(blocks)
    streams = [list(schedule.stream(k, blocks, batches)) for k in range(blocks)]
    graphs = [schedule.keeps_graph(k, blocks) for k in range(blocks)]
    parts = schedule.micro_batches
    two = schedule.two_versions and blocks > 1
    found = play_actions(
        streams,
        costs=costs,
        link=link,
        slow=slow,
        micro_batches=parts,
        graphs=graphs,
        overlaps=schedule.overlaps,
        two_versions=two,
    )
    for k in range(blocks):
        if schedule.stashes:
            found.versions[k] = 2 if two else schedule.delay(k, blocks) + 1
    return found


def play_actions(  # noqa: PLR0913 - the one place where a play states everything
    streams: Sequence[Sequence[Action]],
    *,
    costs: Sequence[BlockCost] | None = None,
    link: LinkCost | None = None,
    slow: Slow | None = None,
    micro_batches: int = 1,
    graphs: Sequence[bool] | None = None,
    overlaps: bool = False,
    two_versions: bool = False,
) -> DryRun:
    """Plays streams of actions as they are, one per block; see `play`.

    Raises ConfigError if they deadlock, if a message that a block waits for is another one than its neighbour sends, if
    a message is never received, or if a batch comes back that has not come in.
    """
    costs = costs or [BlockCost()] * len(streams)
    if len(costs) != len(streams):
        raise ConfigError(f"{len(costs)} costs for {len(streams)} blocks: give one a block")
    wires = [(_Wire(link or LinkCost(), micro_batches), _Wire(link or LinkCost(), micro_batches)) for _ in streams[1:]]
    players = [
        _Player(
            block,
            stream,
            costs[block],
            slow=slow or _even,
            micro_batches=micro_batches,
            keeps_graph=graphs[block] if graphs else True,
            overlaps=overlaps,
            two_versions=two_versions,
            below=wires[block - 1] if block > 0 else None,
            above=wires[block] if block < len(wires) else None,
        )
        for block, stream in enumerate(streams)
    ]
    _advance(players)
    _refuse_deadlock(players)
    _refuse_leftovers(wires)
    found = _summary(players, wires)
    found.micro_batches = micro_batches
    return found


def link_depths(schedule: Schedule, blocks: int) -> list[tuple[int, int]]:
    """Returns for each link how many activations and error gradients can be on their way at once, whatever the timing.

    So many receives have to be posted first for no send to wait for a receive. The most are on their way when the block
    that takes them is the slowest: each of its actions waits until no other block can go on.
    """
    schedule.check(blocks)
    longest = max(schedule.delay(k, blocks) for k in range(blocks))
    streams = [list(schedule.stream(k, blocks, 2 * longest + 4)) for k in range(blocks)]
    return [(_most_waiting(streams, k, up=True), _most_waiting(streams, k, up=False)) for k in range(blocks - 1)]


def _most_waiting(streams: Sequence[Sequence[Action]], link: int, *, up: bool) -> int:
    left = [deque(stream) for stream in streams]
    waiting: Counter[tuple[int, bool]] = Counter()
    slowest = link + 1 if up else link
    deepest = 0

    def go(block: int) -> bool:
        if not left[block] or (left[block][0].op.is_receive and not waiting[_wire_of(block, left[block][0])]):
            return False
        action = left[block].popleft()
        if action.op.is_receive or action.op.is_send:
            waiting[_wire_of(block, action)] += 1 if action.op.is_send else -1
        return True

    moved = True
    while moved:
        moved = sum(go(block) for block in range(len(left)) if block != slowest) > 0
        deepest = max(deepest, waiting[link, up])
        moved = moved or go(slowest)
    return deepest


def _wire_of(block: int, action: Action) -> tuple[int, bool]:
    """Returns the link that an action of a block uses, and whether activations go that way."""
    below = action.op in (Op.RECEIVE_ACTIVATION, Op.SEND_GRADIENT)
    return block - 1 if below else block, action.op in (Op.RECEIVE_ACTIVATION, Op.SEND_ACTIVATION)


def _advance(players: Sequence[_Player]) -> None:
    moved = True
    while moved:
        moved = sum(player.advance() for player in players) > 0  # every player, not the first that moves


def _even(block: int, step: int) -> float:
    del block, step
    return 1.0


def _refuse_deadlock(players: Iterable[_Player]) -> None:
    stuck = [player for player in players if player.waiting_for]
    if stuck:
        waits = ", ".join(f"block {player.block} waits for {player.waiting_for}" for player in stuck)
        raise ConfigError(f"the schedule deadlocks: {waits}")


def _refuse_leftovers(wires: Sequence[_Pair]) -> None:
    for link, pair in enumerate(wires):
        for sender, wire in zip((link, link + 1), pair, strict=True):
            if wire.waiting:
                raise ConfigError(f"block {sender} sends {wire.waiting[0]}, which its neighbour never receives")


class _Wire:
    """One direction of a link: messages arrive in order, each after the last one is through."""

    def __init__(self, cost: LinkCost, micro_batches: int) -> None:
        self._latency = cost.latency
        self._transfer = cost.nbytes / micro_batches / cost.bandwidth
        self._free = 0.0
        self._queue: deque[tuple[Action, float]] = deque()
        self.moments: list[tuple[float, int]] = []

    def send(self, action: Action, now: float) -> None:
        self._free = max(self._free, now) + self._transfer
        self._queue.append((action, self._free + self._latency))
        self.moments.append((now, 1))

    def arrival(self, wanted: Action) -> float | None:
        """Returns when `wanted` is there; None if it has not been sent."""
        if not self._queue:
            return None
        sent, when = self._queue[0]
        if (sent.batch, sent.micro) != (wanted.batch, wanted.micro):
            raise ConfigError(f"a block waits for {wanted}, but its neighbour sends {sent} first")
        return when

    def take(self, now: float) -> None:
        self._queue.popleft()
        self.moments.append((now, -1))

    @property
    def waiting(self) -> list[Action]:
        return [action for action, _ in self._queue]

    def depth(self) -> int:
        deepest = here = 0
        for _, change in sorted(self.moments):
            here += change
            deepest = max(deepest, here)
        return deepest


_Pair = tuple[_Wire, _Wire]  # activations up, error gradients down


class _Player:
    """Plays one block's stream as far as its neighbours let it."""

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        block: int,
        stream: Sequence[Action],
        cost: BlockCost,
        *,
        slow: Slow,
        micro_batches: int,
        keeps_graph: bool,
        overlaps: bool,
        two_versions: bool,
        below: _Pair | None,
        above: _Pair | None,
    ) -> None:
        self.block, self._stream, self._place = block, stream, 0
        parts = micro_batches
        self._cost = {
            Op.FORWARD: cost.forward / parts,
            Op.RECOMPUTE: cost.recompute / parts,
            Op.BACKWARD: cost.backward / parts,
            Op.UPDATE: cost.update,
        }
        self._slow, self._keeps_graph, self._overlaps, self._two = slow, keeps_graph, overlaps, two_versions
        self._below, self._above = below, above
        self.now = 0.0
        self._side_lane = 0.0  # until when a recompute runs beside
        self._updates = self._step = 0
        self._forwarded: dict[tuple[int, int | None], int] = {}  # the version of the weights used
        self.staleness: Counter[int] = Counter()
        self.done: list[Done] = []
        self.waiting_for: Action | None = None
        self._kept = {"inputs": 0, "graphs": 0}
        self.most = {"inputs": 0, "graphs": 0}

    def advance(self) -> bool:
        """Does what can be done; returns whether anything was."""
        before = self._place
        while self._place < len(self._stream) and self._do(self._stream[self._place]):
            self._place += 1
        self.waiting_for = self._stream[self._place] if self._place < len(self._stream) else None
        return self._place > before

    def _do(self, action: Action) -> bool:
        begin = self.now
        if action.op.is_receive:
            wire = self._wire(action)
            arrival = wire.arrival(action)
            if arrival is None:
                return False
            self.now = max(self.now, arrival)
            wire.take(self.now)
        elif action.op.is_send:
            self._wire(action).send(action, self.now)
        else:
            begin = self._compute(action)
        end = self._side_lane if action.op is Op.RECOMPUTE and self._overlaps else self.now
        self.done.append(Done(self.block, action, begin, end))
        return True

    def _compute(self, action: Action) -> float:
        if action.op is Op.FORWARD or (action.op is Op.RECOMPUTE and self._overlaps):
            soon = self._stream[self._place : self._place + 3]  # a recompute, a receive, the forward beside
            self._step = next((a.batch for a in soon if a.op is Op.FORWARD), self._step)
        seconds = self._cost.get(action.op, 0.0) * self._slow(self.block, self._step)
        key = (action.batch, action.micro)
        begin = self.now
        if action.op is Op.FORWARD:
            self._forwarded[key] = max(0, action.batch - 1) if self._two else self._updates
            self._keep("graphs" if self._keeps_graph else "inputs", +1)
        elif action.op is Op.RECOMPUTE:
            self._keep("graphs", +1)
            if self._overlaps:
                begin = max(self.now, self._side_lane)
                self._side_lane = begin + seconds
                return begin
        elif action.op is Op.BACKWARD:
            begin = self.now = max(self.now, self._side_lane)
            if key not in self._forwarded:
                raise ConfigError(f"block {self.block} has {action} before the forward of that batch")
            self.staleness[self._updates - self._forwarded.pop(key)] += 1
            self._keep("graphs", -1)
            if not self._keeps_graph:
                self._keep("inputs", -1)
        elif action.op is Op.UPDATE:
            self._updates += 1
        self.now += seconds
        return begin

    def _keep(self, what: str, change: int) -> None:
        self._kept[what] += change
        self.most[what] = max(self.most[what], self._kept[what])

    def _wire(self, action: Action) -> _Wire:
        link, up = _wire_of(self.block, action)
        pair = self._below if link < self.block else self._above
        if pair is None:
            raise ConfigError(f"block {self.block} has no neighbour for {action}")
        return pair[0 if up else 1]


def _summary(players: Sequence[_Player], wires: Sequence[_Pair]) -> DryRun:
    seconds = max((player.now for player in players), default=0.0)
    busy = sum(_covered(done for done in player.done if done.action.op in _LOCAL) for player in players)
    return DryRun(
        timeline=sorted((done for player in players for done in player.done), key=lambda done: (done.end, done.block)),
        seconds=seconds,
        period=period_of(players[0].done),
        bubble=1 - busy / (seconds * len(players)) if seconds else 0.0,
        staleness=[player.staleness for player in players],
        queue=[(up.depth(), down.depth()) for up, down in wires],
        inputs=[player.most["inputs"] for player in players],
        graphs=[player.most["graphs"] for player in players],
        versions=[1 for _ in players],
    )


def period_of(done: Sequence[Done]) -> float:
    """Returns the seconds that a batch takes in the steady state, as in `DryRun.period`, from what one block did.

    That may have been played, or recorded in a real run.
    """
    last_in = max((d.begin for d in done if d.action.op is Op.FORWARD), default=0.0)
    updates = [d for d in done if d.action.op is Op.UPDATE and d.end <= last_in]
    if len(updates) < 2:
        return 0.0
    first, last = updates[(len(updates) - 1) // 2], updates[-1]
    return (last.end - first.end) / (last.action.batch - first.action.batch)


def _covered(done: Iterable[Done]) -> float:
    """Returns the seconds in which at least one of the actions ran."""
    total, until = 0.0, 0.0
    for begin, end in sorted((d.begin, d.end) for d in done):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def draw(run: DryRun, *, unit: float = 1.0, width: int = 24) -> str:
    """Draws the timeline as the papers do: a row per block, a column per `unit` seconds, the first `width` of them.

    A column shows what the block computes then; `.` is idle, and `F5+R3` a recompute beside a forward.
    """
    blocks = 1 + max((done.block for done in run.timeline), default=-1)
    cells = [[list[str]() for _ in range(width)] for _ in range(blocks)]
    for done in run.timeline:
        if done.action.op in (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD):
            first, end = int(done.begin / unit + 1e-9), int(done.end / unit + 1 - 1e-9)
            for column in range(first, min(end, width)):
                cells[done.block][column].append(str(done.action))
    texts = [["+".join(sorted(cell)) or "." for cell in row] for row in cells]
    wide = [max((len(row[column]) for row in texts), default=0) for column in range(width)]
    return "\n".join(
        f"block {block} " + " ".join(text.ljust(w) for text, w in zip(row, wide, strict=True)).rstrip()
        for block, row in enumerate(texts)
    )
