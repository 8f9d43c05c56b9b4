"""Is what a user holds of a pipeline: one block of the model on this rank, trained in step with the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from stalempi import context as contexts
from stalempi.context import Context
from stalempi.errors import ConfigError
from stalempi.pipeline.block import Loss, Tensors
from stalempi.pipeline.build import BlockOptions, MakeOptimizer, build_runner
from stalempi.pipeline.cut import Plan, check_split, choose_plan, cut, known_plan
from stalempi.pipeline.dryrun import Done
from stalempi.pipeline.evaluation import Score, evaluate_block
from stalempi.pipeline.link import Lane, Links, Note
from stalempi.pipeline.replicas import Replicas
from stalempi.pipeline.runner import Runner, Stretch
from stalempi.pipeline.saving import block_state, check_same, copy_state, load_block
from stalempi.pipeline.schedules import BP, Schedule
from stalempi.pipeline.split import Tie, merge_state_dicts
from stalempi.pipeline.wiring import Wiring
from stalempi.pipeline.wishes import Wishes
from stalempi.roles import assign_block
from stalempi.silence import default_stall_timeout
from stalempi.train.checkpoint import CheckpointStore

__all__ = ["Pipeline", "PipelineStats"]

Batch = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class PipelineStats:
    """What this rank's block has done.

    Attributes:
        block, replica: its number, and of which copy of the pipeline.
        steps: batches taken in.
        updates, samples: made, and what they stood for.
        skipped: updates left out because scaled gradients overflowed.
        waited: seconds spent in waiting for neighbours.
        staleness: how many backwards came so many updates after their forward.
        most_held: the most batches (or micro-batches) between their forward and their backward at once.
        versions: of the weights, the most at once.
    """

    block: int
    replica: int
    steps: int
    updates: int
    samples: int
    skipped: int
    waited: float
    staleness: dict[int, int]
    most_held: int
    versions: int


class Pipeline:
    """Trains a model cut into one block a rank; every rank makes it alike and calls the same methods in one order.

    Args:
        model: an `nn.Sequential`, or any model where `split` names modules. Each rank keeps its own block and drops the
            rest; of a model built under `torch.device("meta")` each rank fills in its own block alone.
        optimizer: makes the optimizer of a block's parameters, as in `lambda p: torch.optim.SGD(p, lr=0.01)`.
        loss: `loss(output, labels)`, a mean over samples; used on the last rank.
        method: a schedule, as in `stalempi.DSP(p=(1, 1, 0), m=(4, 2, 0))`.
        split: index of the first unit of each block but the first (see `stalempi.pipeline.split.flatten`), or for a
            model that is not sequential the name of the module that each begins with; None: rank 0 times the units on
            its first batch, and the slowest block is made as fast as can be.
        replicas: copies of the whole pipeline, on consecutive ranks; a block's gradient is the mean over its copies.
        send_labels: labels are given on the first rank and sent to the last one, instead of given there.
        options: see `BlockOptions`: running statistics, autocast, clipping, learning-rate schedule, seed.
        stall_timeout: seconds of silence of a neighbour that end the job.
        context: the rank to be; that of `init` by default.
        wants_stop: whether this rank has been asked to stop, as by a signal: called in each step. Give it on all ranks.
        wants_pause: whether to empty the pipe, as for a checkpoint: called in each step of rank 0.
        stretch: makes computations longer, for experiments.
        record: called with every action that is done.
        identity: what a run that resumes from a checkpoint must have in common with the one that saved it, besides
            method, blocks, replicas and seed: plain values by name, as in {"batch size": 32}.

    Attributes:
        block, blocks, replica: which block of how many this rank holds, of which copy of the pipeline.
        is_first, is_last: whether this rank takes the data in, and whether it computes the loss.

    Raises ConfigError if a value cannot be used, or the ranks do not divide into pipelines of the method's blocks.
    """

    def __init__(  # noqa: PLR0913 - the one place where a user states everything
        self,
        model: nn.Module,
        *,
        optimizer: MakeOptimizer,
        loss: Loss,
        method: Schedule | None = None,
        split: Sequence[int] | Sequence[str] | None = None,
        replicas: int = 1,
        send_labels: bool = False,
        options: BlockOptions | None = None,
        stall_timeout: float | None = None,
        context: Context | None = None,
        wants_stop: Callable[[], bool] | None = None,
        wants_pause: Callable[[], bool] = lambda: False,
        stretch: Stretch | None = None,
        record: Callable[[Done], None] | None = None,
        identity: Mapping[str, str | int | None] | None = None,
    ) -> None:
        self._context = _with_blocks(context or contexts.current(), replicas)
        role, transport = self._context.role, self._context.transport
        assert role.block is not None, "a model-parallel role"
        assert isinstance(transport, Links), "a transport that joins blocks"
        self._timeout = default_stall_timeout() if stall_timeout is None else stall_timeout
        self._method = method or BP()
        blocks = self._context.size // replicas
        self._method.check(blocks)
        check_split(model, split, blocks)
        self._wiring = Wiring(
            transport, role.block, blocks, role.replica, replicas, self._context.device, self._timeout
        )
        self.block, self.blocks, self.replica = role.block, blocks, role.replica
        self.is_first, self.is_last = self._wiring.is_first, self._wiring.is_last
        self._model: nn.Module | None = model
        self._split, self._make_optimizer, self._loss = split, optimizer, loss
        self._send_labels, self._options = send_labels, options or BlockOptions()
        self._stretch, self._record = stretch, record
        self._identity = {
            "method": str(self._method),
            "batches an update": self._method.accumulate,
            "blocks": blocks,
            "replicas": replicas,
            "seed": self._options.seed,
            **(identity or {}),
        }
        self._wants_stop, self._wants_pause = wants_stop, wants_pause
        self._wishes: Wishes | None = None
        self._ties: tuple[Tie, ...] = ()
        self._plan: Plan | None = None
        self._copies: Replicas | None = None
        self._runner: Runner | None = None
        self._closed = False
        if plan := known_plan(split, blocks):
            self._begin(plan)
        contexts.open_jobs.append(self)

    @property
    def step_count(self) -> int:
        """Batches taken in so far."""
        return self._runner.batches if self._runner else 0

    @property
    def stopping(self) -> bool:
        """Whether the batch taken in last is the last one, since a rank has been asked to stop: leave the loop."""
        return self._runner is not None and self._runner.note is Note.STOP

    @property
    def pausing(self) -> bool:
        """Whether rank 0 wants the pipe emptied after the batch taken in last: every rank finds so at that batch."""
        return self._runner is not None and self._runner.note is Note.PAUSE

    @property
    def module(self) -> nn.Module:
        """The block on this rank; ConfigError before the model is cut, which the first step does if `split` is None."""
        return self._known().block.module

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the block on this rank; None if it has no parameters."""
        return self._known().block.updater.optimizer

    @property
    def stats(self) -> PipelineStats:
        """What this rank's block has done so far."""
        runner = self._known()
        block = runner.block
        return PipelineStats(
            block=self.block,
            replica=self.replica,
            steps=self.step_count,
            updates=block.updater.updates,
            samples=block.updater.samples,
            skipped=block.updater.skipped,
            waited=runner.waited,
            staleness=dict(sorted(block.staleness.items())),
            most_held=block.most_held,
            versions=max(1, block.weights.most_kept),
        )

    def step(self, x: Batch | None = None, y: Batch | None = None) -> float | None:
        """Lets a batch in and does this block's share of the work.

        Args:
            x: the batch, used on the first rank.
            y: its labels, used on the last rank, or on the first with `send_labels`.

        Returns the loss of the batch that came through last, a mean over its samples, on the last rank; None elsewhere.
        """
        if self._closed or self.stopping:
            raise ConfigError("this pipeline takes no more batches: it is closed, or has been asked to stop")
        runner = self._started(x)
        runner.note = self._wishes.now() if self._wishes else Note.NONE
        inputs = self._take(x, "the first rank needs the batch: call step(x, y)") if self.is_first else None
        labels = None
        if self.is_first if self._send_labels else self.is_last:
            labels = self._take(y, "this rank needs the labels: call step(x, y)")
        runner.add_step(inputs, labels)
        runner.advance()
        return runner.block.losses[-1] if runner.block.losses else None

    def drain(self) -> None:
        """Finishes the batches that are inside; after it every block has seen every batch."""
        if self._runner:
            self._runner.add_drain()
            self._runner.advance()
            self._runner.restart()

    def evaluate(self, batches: Iterable[tuple[Batch, Batch]]) -> float:
        """Drains, then returns the share of labels that the model gets right, on every rank; see `test`."""
        return self.test(batches)[0]

    def test(self, batches: Iterable[tuple[Batch, Batch]]) -> tuple[float, float]:
        """Drains, then returns accuracy (0 .. 1) and mean loss over `batches`, on every rank.

        Every rank gives the same batches; the first uses the data, the last the labels. Outputs are (samples, ...,
        classes), labels int64 (samples, ...). The first copy of the pipeline does the work. Running statistics of
        normalisation layers are those of the first copy.
        """
        source = iter(batches)
        if self._runner is None:
            first = next(source, None)
            self._started(first[0] if first else None)
            source = chain([first] if first else [], source)
        self.drain()
        runner, score = self._started(None), Score()
        if self.replica == 0:
            below, above = self._wiring.for_evaluation()
            score = evaluate_block(runner.block, self._pairs(source), self._loss, below=below, above=above)
        told = self._tell(asdict(score))
        total = Score(**told[self.blocks - 1])
        if not total.count:
            raise ConfigError("there is nothing to evaluate: give at least one batch")
        return total.correct / total.count, total.loss / total.count

    def state_dict(self) -> dict[str, Tensor]:
        """Drains, then returns the whole model's state on rank 0, on the CPU; {} on the others. Every rank calls it."""
        self.drain()
        # copies, on rank 0 too: what is returned must not go on training
        state = {key: value.detach().to("cpu", copy=True) for key, value in self.module.state_dict().items()}
        listed = self._tell(list(state) if self.replica == 0 else [])
        if self.block == 0 and self.replica == 0:
            parts = [state, *(self._receive_state(rank, listed[rank]) for rank in range(1, self.blocks))]
            return merge_state_dicts(parts, self._ties)
        if self.replica == 0:
            sender = self._wiring.sender(0, Lane.STATE, 1)
            for place, value in enumerate(state.values()):
                sender.send((place, 0), [value])
            sender.flush()
        return {}

    def save(self, path: str | Path) -> None:
        """Drains, then writes the whole model's state_dict on rank 0: plain torch loads it. Every rank calls it."""
        state = self.state_dict()
        if self.block == 0 and self.replica == 0:
            torch.save(state, path)

    def save_checkpoint(self, store: CheckpointStore, more: dict[str, Any] | None = None) -> Path | None:
        """Drains, then writes all that training needs to go on, one part a block and copy; every rank calls it.

        Args:
            store: where; a folder that all ranks share.
            more: plain values of the caller's, from rank 0.

        Returns the checkpoint's folder on rank 0, None on the others.
        """
        if self._runner is None or self._plan is None:
            raise ConfigError("there is nothing to save before the first step")
        self.drain()
        is_root = self._context.rank == 0
        name = store.next_name() if is_root else ""
        if is_root:
            store.begin(name)
        name = self._tell(name)[0]
        if self.replica == 0:
            store.write_part(name, f"block-{self.block}", block_state(self._runner))
        else:
            store.write_part(name, self._copy_part, copy_state(self._runner))
        self._tell(None)  # all parts are there
        if not is_root:
            return None
        store.write_part(name, "run", {"plan": asdict(self._plan), "identity": self._identity, "more": more or {}})
        return store.commit(name)

    @property
    def _copy_part(self) -> str:
        return f"block-{self.block}-copy-{self.replica}"

    def load_checkpoint(self, path: Path | None) -> dict[str, Any] | None:
        """Goes on from a checkpoint, before the first step; every rank calls it.

        Args:
            path: of the checkpoint, as rank 0 knows it: the other ranks use what rank 0 gives. None: start fresh.

        Returns what `more` was, on every rank; None to start fresh.

        Raises ConfigError if it is of another model, method, number of blocks or replicas, seed or `identity`.
        """
        if self.step_count:
            raise ConfigError("a checkpoint is loaded before the first step")
        found = self._tell(path and str(path))[0]  # a rank may see an older state of a shared folder
        if found is None:
            return None
        path = Path(found)
        run = CheckpointStore.load_part(path, "run")
        check_same(path, run.get("identity", {}) if isinstance(run, dict) else {}, self._identity)
        plan = Plan(**run["plan"])
        if self._runner is None:
            self._begin(plan)
        elif self._plan and self._plan.boundaries != plan.boundaries:
            raise ConfigError(f"checkpoint {path} was cut at {plan.boundaries}, this model at {self._plan.boundaries}")
        assert self._runner is not None, "begun"
        own = CheckpointStore.load_part(path, self._copy_part) if self.replica else None
        load_block(self._runner, CheckpointStore.load_part(path, f"block-{self.block}"), own)
        return dict(run["more"])

    def gather_stats(self) -> list[PipelineStats]:
        """Returns what every rank's block has done, by rank, on every rank."""
        told = self._tell(asdict(self.stats))
        for each in told:
            each["staleness"] = {int(updates): times for updates, times in each["staleness"].items()}
        return [PipelineStats(**each) for each in told]

    def close(self) -> None:
        """Drains and retires; does nothing a second time."""
        if self._closed:
            return
        self.drain()
        self._closed = True
        contexts.open_jobs.remove(self)
        if self._runner:
            self._runner.close()
            if self._copies:
                self._copies.close()
            if self._wishes:
                self._wishes.close()
            self._tell(None)  # no message of a later pipeline meets a receive of this one

    def finish(self) -> None:
        """Closes what the program left open when it ended."""
        self.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _known(self) -> Runner:
        if self._runner is None:
            raise ConfigError("the model is not cut yet: the first step times it and does so; or give split")
        return self._runner

    def _started(self, x: Batch | None) -> Runner:
        """Returns the runner; the first time it cuts the model, by the batch `x` that rank 0 has."""
        if self._runner is None:
            assert self._model is not None, "not cut yet"
            plan = Plan([], [], [])
            if self.is_first and self.replica == 0:
                inputs = self._take(x, "the first rank needs a batch to cut the model by: call step(x, y)")
                device = self._context.device
                plan = choose_plan(self._model, self._split, self.blocks, self._method, inputs, device)
            self._begin(Plan(**self._tell(asdict(plan))[0]))
        assert self._runner is not None, "begun"
        return self._runner

    def _begin(self, plan: Plan) -> None:
        """Cuts the model, keeps this rank's block, and opens the links to its neighbours."""
        assert self._model is not None, "not cut yet"
        mine = cut(self._model, plan, self.block, seed=self._options.seed, device=self._context.device)
        self._model, self._ties, self._plan = None, mine.ties, plan
        self._copies = self._wiring.copies([*mine.module.parameters(), *mine.module.buffers()])
        if self._wants_stop:
            self._wishes = Wishes(self._wiring, self._copies, stop=self._wants_stop, pause=self._wants_pause)
        self._runner = build_runner(
            mine.module,
            self.block,
            self.blocks,
            self._method,
            self._make_optimizer,
            self._wiring.ends(self._method, mine.ties, send_labels=self._send_labels, copies=self._copies),
            loss=self._loss,
            options=self._options,
            stretch=self._stretch,
            record=self._record,
            progress=self._wiring.links.progress,
        )

    def _receive_state(self, rank: int, keys: Sequence[str]) -> dict[str, Tensor]:
        receiver = self._wiring.receiver(rank, Lane.STATE, 1, device=torch.device("cpu"))
        return {key: receiver.receive((place, 0))[0] for place, key in enumerate(keys)}

    def _tell(self, value: Any) -> list[Any]:
        """Gives every rank what every rank says."""
        said = self._context.transport.allgather(json.dumps(value).encode(), self._timeout)
        return [json.loads(text) for text in said]

    def _take(self, batch: Batch | None, otherwise: str) -> Tensors:
        if batch is None:
            raise ConfigError(otherwise)
        given: tuple[Any, ...] = (batch,) if isinstance(batch, Tensor) else tuple(batch)
        if not given or not all(isinstance(tensor, Tensor) and tensor.dim() > 0 for tensor in given):
            raise ConfigError("a batch is a tensor of shape (samples, ...), or several of them")
        return tuple(tensor.to(self._context.device) for tensor in given)

    def _pairs(self, batches: Iterable[tuple[Batch, Batch]]) -> Iterator[tuple[Tensors, Tensors]]:
        for x, y in batches:
            yield self._take(x, "a batch is (data, labels)"), self._take(y, "a batch is (data, labels)")


def _with_blocks(context: Context, replicas: int) -> Context:
    """Returns the context in which each rank is a block, and makes it the one of this process if `context` is."""
    if replicas < 1 or context.size % replicas:
        raise ConfigError(f"{context.size} rank(s) do not divide into {replicas} replicas: start a multiple of them")
    role = assign_block(context.rank, context.size, context.size // replicas)
    changed = replace(context, role=role)
    if contexts.is_initialized() and context is contexts.current():
        contexts.set_current(changed)
    return changed
