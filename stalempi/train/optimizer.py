"""Wraps a torch optimizer so that its steps are taken by the server."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import optimizer as hooks

from stalempi import context as contexts
from stalempi import preempt
from stalempi.clip import Clip
from stalempi.compress import make_compression
from stalempi.context import Context
from stalempi.correction import Correction
from stalempi.errors import ConfigError
from stalempi.follower import Follower
from stalempi.group import Group, check_forward, check_groups
from stalempi.memory import server_memory
from stalempi.orders import Orders
from stalempi.peer import Peer
from stalempi.pipeline.link import Links
from stalempi.policy import Allreduce, CachedSSP
from stalempi.policy.base import Decision, Event, Policy
from stalempi.replica import DEFAULT_BUCKET_BYTES, Replica, difference
from stalempi.roles import Role
from stalempi.server import Server, ServerOptions
from stalempi.shares import check_servers
from stalempi.silence import default_stall_timeout
from stalempi.stats import RunStats
from stalempi.train.evaluation import Evaluation
from stalempi.train.keeper import Checkpoint, Keeper
from stalempi.train.notes import NOTE_BYTES, Notebook, Positioned
from stalempi.train.restart import Restart, WorkerRestart
from stalempi.train.samples import SampleCount, count_samples
from stalempi.train.snapshots import Album, Critic, Exhibition, Gallery
from stalempi.worker import OVERLAPS, Worker

__all__ = ["DistributedOptimizer"]

T = TypeVar("T")


class DistributedOptimizer(torch.optim.Optimizer):
    """Takes the steps of `optimizer` on the server, with the gradients of every worker.

    Every rank constructs it alike, after `stalempi.init()`, with the same model and policy; all then have rank 0's
    weights, whatever their seeds. The server calls `serve`, a worker trains as usual and calls `close`.

    Args:
        optimizer: any torch optimizer that needs no closure; on a worker it only holds the hyper-parameters, which
            travel with each push, so that a torch LR scheduler on a worker takes effect.
        model: its model, on the device where this rank computes. A worker receives parameters into it. One that
            torch.compile returned stands for the model inside, so that not every rank has to compile.
        policy: when a worker may go on: BSP(), ASP(), SSP(bound), DSSP(lower, upper); or Allreduce(), under which there
            is no server, and every rank is a worker until `close`.
        total_samples: global samples after which `done` becomes true on workers; None: no limit.
        schedule: factor of the learning rate as a function of global samples, the same for every policy.
        nonfinite: "raise" ends the job at a gradient with NaN or infinity, "skip" counts it and goes on.
        clip_norm, clip_value: largest 2-norm and largest element of each gradient that the server applies: under BSP
            the mean of all workers', else one worker's. By value comes first.
        correction: mends stale gradients on the server; see `stalempi.correction` for what each costs.
        bucket_bytes: about how many bytes one message carries.
        evaluation: what is measured of the model along the way, and how often; see `stalempi.Evaluation`.
        stall_timeout: seconds after which a silent rank ends the job; STALEMPI_STALL_TIMEOUT or 600 by default.
        context: the rank to be; the one of `init` by default.
        observe: called on rank 0 with each event and the decisions that followed.
        checkpoint: where and when the run is saved, and what it goes on from; see `stalempi.Checkpoint`.
        overlap: how a push moves while backward makes it: "thread" calls MPI at each parameter's gradient and from a
            thread, "hooks" only there, "off" sends nothing before `step`. The first step is watched: if its gradients
            are not as one backward made them (clipped, accumulated, scaled), nothing is ever sent early.
        run_ahead: whether a worker begins its next iteration on the parameters that it has, while its push and release
            are on their way. That counts as one more iteration in the policy's bound, so SSP and DSSP need one of 1.
        early_forward: whether `step` returns when its release begins to arrive, so that each module waits for its own
            parameters only; `synchronize` waits for all. The first release comes whole, since its step shows which
            modules are called.
        compression: of gradients on their way to the server: "none", "fp16", "bf16", or "topk:SHARE" for the largest
            elements only, the rest being added to the next gradient.

    A torch.amp.GradScaler works as ever: `scaler.step(optimizer)`, `scaler.update()`. A step in which it finds infinity
    or NaN is an empty push: the clock goes on and nothing is applied.

    Raises ConfigError if a value cannot be used, or if the ranks' models or options differ (it says how).
    """

    # GradScaler then always calls `step`, with `found_inf` and `grad_scale` set for that call; else it would leave out
    # steps, and the other workers would wait for this one's push.
    _step_supports_amp_scaling = True

    def __init__(  # noqa: PLR0913 - the one place where a user states everything
        self,
        optimizer: torch.optim.Optimizer,
        *,
        model: nn.Module,
        policy: Policy,
        total_samples: int | None = None,
        schedule: Callable[[int], float] | None = None,
        nonfinite: str = "raise",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        correction: Correction | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        evaluation: Evaluation | None = None,
        stall_timeout: float | None = None,
        context: Context | None = None,
        observe: Callable[[Event, list[Decision]], None] | None = None,
        checkpoint: Checkpoint | None = None,
        overlap: str = "thread",
        run_ahead: bool = False,
        early_forward: bool = False,
        compression: str = "none",
    ) -> None:
        self._outer = context or contexts.current()
        self._context = self._outer if policy.has_server else self._outer.without_server()
        _check_optimizer(optimizer)
        self._timeout = timeout = stall_timeout if stall_timeout is not None else default_stall_timeout()
        role = self._context.role
        clip = Clip(clip_norm, clip_value) if (clip_norm, clip_value) != (None, None) else None
        options = ServerOptions(
            total_samples,
            schedule,
            nonfinite,
            min(60.0, timeout / 2),
            timeout if role.group_size == 1 else 1.25 * timeout,  # a leader speaks first: it knows which member
            workers=role.takes_from or None,
            clip=clip,
            note_bytes=NOTE_BYTES * role.group_size if checkpoint else 0,
        )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        inside = _inside(model)
        servers = max(1, role.servers)
        self._replicas = [
            Replica(
                inside,
                optimizer,
                bucket_bytes=bucket_bytes,
                direct=self._context.transport.direct,
                compression=make_compression(compression),
                share=(server, servers),
                sparse=_may_be_sparse(policy, role, correction, clip),
            )
            for server in range(servers)
        ]
        self._replica = self._replicas[role.rank if role.is_server else 0]
        self._closed = self._evaluated = False
        if role.evaluator_rank and not evaluation:
            raise ConfigError("the job has an evaluator rank, and nothing for it to do: give evaluation=...")
        self._evaluation = evaluation
        _check_job(policy, role, correction, checkpoint, overlap, compression)
        check_servers(policy, role.servers, clip_norm=clip_norm)
        check_forward(policy, role.group_size, run_ahead=run_ahead, early_forward=early_forward)
        restart = self._load(checkpoint)
        self._join(
            [
                f"groups of {role.group_size}, evaluator {role.evaluator_rank}",
                f"evaluate every {evaluation.every if evaluation else None}",
                f"policy {policy}",
                f"total_samples {total_samples}",
                f"nonfinite {nonfinite}",
                f"clip_norm {clip_norm}, clip_value {clip_value}",
                f"correction {correction.name if correction else None}",
                f"checkpoint every {checkpoint.every}" if checkpoint else "no checkpoint",
                f"run_ahead {run_ahead}",
            ],
            timeout,
        )
        self._server: Server | Follower | None = None
        self._worker: Worker | Peer | None = None
        self._gallery: Gallery | None = None
        self._critic: Critic | None = None
        self._keeper: Keeper | None = None
        self._notebook: Notebook | None = None
        self._observe = observe
        transport = self._context.transport
        self._seen = SampleCount() if role.shard_rank is None else count_samples(inside)
        if isinstance(policy, Allreduce):
            self._worker = Peer(
                self._replica,
                transport,
                policy=policy,
                options=options,
                overlap=overlap != "off",
                seen=lambda: self._seen.seen,
                observe=self._watch if role.rank == 0 else None,
            )
            if evaluation and role.rank == 0:
                self._gallery = Album(self._worker, evaluation, self._replicas)
        elif role.is_server and role.rank:
            assert isinstance(transport, Links)
            self._server = Follower(self._replica, transport, transport, options=options, correction=correction)
        elif role.is_server:
            self._make_server(policy, options, correction, checkpoint, restart)
        elif role.is_evaluator:
            assert evaluation is not None
            self._critic = Critic(self._replicas, evaluation, transport, timeout=timeout)
        else:
            self._notebook = Notebook(self._context.device) if checkpoint else None
            self._worker = self._make_worker(
                schedule, clip, overlap=overlap, run_ahead=run_ahead, early_forward=early_forward
            )
        self._take_role(self._outer, self._context)
        contexts.open_jobs.append(self)
        self._rejoin(
            checkpoint,
            restart,
            restart.for_workers(policy, role.num_workers, role.group_size, total_samples) if restart else b"",
        )

    def _make_server(
        self,
        policy: Policy,
        options: ServerOptions,
        correction: Correction | None,
        checkpoint: Checkpoint | None,
        restart: Restart | None,
    ) -> None:
        role, transport, evaluation = self._context.role, self._context.transport, self._evaluation
        assert isinstance(transport, Links)
        self._server = server = Server(
            self._replica,
            policy,
            transport,
            options=options,
            correction=correction,
            observe=self._watch,
            orders=Orders(self._replicas[1:], role.num_workers, transport, self._timeout),
        )
        server.attendant = self._keeper = Keeper(server, checkpoint, restart)
        if evaluation and role.evaluator_rank:
            self._gallery = Exhibition(
                server, evaluation, self._replicas, transport, role.evaluator_rank, timeout=self._timeout
            )
        elif evaluation:
            self._gallery = Album(server, evaluation, self._replicas)

    def _make_worker(self, schedule: Callable[[int], float] | None, clip: Clip | None, **options: Any) -> Worker:
        role, timeout = self._context.role, self._timeout
        patience = (3 if role.group_rank else 2) * timeout  # who is behind another waits longer, and lets it speak
        group = Group(role.pushes_to, role.takes_from, timeout)
        note = self._notebook.write if self._notebook else None
        return Worker(
            self._replicas,
            self._context.transport,
            stall_timeout=patience,
            schedule=schedule,
            clip=clip,
            group=group,
            note=note,
            **options,
        )

    def _load(self, checkpoint: Checkpoint | None) -> Restart | None:
        """Gives the server what its checkpoint holds, if there is one, which then joining gives to all ranks."""
        path = checkpoint.find() if checkpoint and self._context.is_server and not self._context.rank else None
        if path is None:
            return None
        restart = Restart(path)
        restart.load(self._replica)
        self.param_groups, self.state = self._replica.optimizer.param_groups, self._replica.optimizer.state
        return restart

    def _rejoin(self, checkpoint: Checkpoint | None, found: Restart | None, ours: bytes) -> None:
        """Brings other ranks to where rank 0's checkpoint has them, if it has `found` one: `ours` tells workers."""
        known = self._context.transport.allgather(ours, self._timeout)[0] if checkpoint else b""
        if not known:
            return
        if found and isinstance(self._server, Server):
            found.hand_out(self._server)
        if isinstance(self._server, Follower):
            self._server.take_over()
            self.param_groups, self.state = self._replica.optimizer.param_groups, self._replica.optimizer.state
        if isinstance(self._worker, Worker) and self._notebook:
            restart = WorkerRestart(known, self._context.role)
            restart.load(self._replica, self._notebook)
            restart.bring(self._worker)
            self._opt_called = self._worker.step_count > 0  # a torch LR scheduler asks whether there was a step
            self._end_if_preempted()

    def _join(self, options: list[str], timeout: float) -> None:
        """Makes sure that all ranks mean the same, and gives all of them rank 0's weights."""
        transport = self._context.transport
        text = "\n".join([*options, *(line for replica in self._replicas for line in replica.describe())]).encode()
        digests = transport.allgather(hashlib.sha256(text).digest(), timeout)
        if len(set(digests)) > 1:
            raise ConfigError(f"the ranks differ: {difference(transport.allgather(text, timeout))}")
        for replica in self._replicas:
            transport.broadcast(replica.state(), timeout)

    def _watch(self, event: Event, decisions: list[Decision]) -> None:
        """Sees every event on the server."""
        if self._gallery:
            self._gallery.look(event.now)
        if self._observe:
            self._observe(event, decisions)

    @property
    def step_count(self) -> int:
        """Steps of this worker, or updates of the server, so far."""
        if self._worker:
            return self._worker.step_count
        return self._server.stats.updates if self._server else 0

    @property
    def global_samples(self) -> int:
        """Samples of all workers that have been applied, as of this worker's last release."""
        if self._worker:
            return self._worker.global_samples
        return self._server.stats.samples if self._server else 0

    @property
    def rate(self) -> float:
        """Learning rate of the latest update, schedule and correction included (on the server; else on every rank)."""
        return self._worker.rate if isinstance(self._worker, Peer) else self._need_server("rate").rate

    @property
    def share_bytes(self) -> list[int]:
        """Bytes of the parameters that each server holds, by rank; [] where there is no server."""
        return [replica.params.nbytes for replica in self._replicas][: self._context.role.servers]

    @property
    def done(self) -> bool:
        """Whether `total_samples` have been applied: time for a worker to leave its loop."""
        return self._worker is not None and self._worker.stopping

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that the run went on from; None if it started fresh (server only)."""
        return self._need_keeper("resumed_from").resumed_from

    @property
    def stats(self) -> RunStats:
        """What has happened so far (on the server; on every rank where there is none)."""
        return self._worker.stats if isinstance(self._worker, Peer) else self._need_server("stats").stats

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that this server holds, see `stalempi.memory.server_memory` (servers only)."""
        if self._server is None:
            raise ConfigError(f"memory is for a server, but this is {self._context.role}: see stalempi.is_server()")
        return server_memory(self._server)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients in place, as views of what is sent; `set_to_none` is torch's and has no effect."""
        if self._worker:
            self._worker.zero_grad()

    def step(  # type: ignore[override]
        self, closure: Callable[[], T] | None = None, *, samples: int | None = None, loss: float = math.nan
    ) -> T | None:
        """Pushes this worker's gradient, waits for its release, and has the new parameters in the model.

        Args:
            closure: as in torch: computes the loss and its gradients, called once.
            samples: samples that the gradient is the mean of; by default those that went through the model in training
                mode since the last step (their first dimension is counted), or 1.
            loss: this batch's loss, for the server's progress report.
        """
        watched = _is_watched(self)
        return (self._watched_step if watched else self._step)(closure, samples=samples, loss=loss)

    # torch would otherwise put around it, at each step, what only profilers and hooks need, and a tiny model feels that
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], T] | None, *, samples: int | None, loss: float) -> T | None:
        worker = self._need_worker("step")
        result: T | None = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            if isinstance(result, (float, torch.Tensor)):
                loss = float(result.detach()) if isinstance(result, torch.Tensor) else result
        samples = samples if samples is not None else max(1, self._seen.seen)
        found_inf, scale = float(getattr(self, "found_inf", 0.0)), getattr(self, "grad_scale", None)
        if isinstance(worker, Peer):
            if scale is not None:
                raise ConfigError(
                    "a gradient scaler needs a server, for allreduce has sent buckets by then: take bfloat16"
                )
            worker.step(samples=samples, loss=loss)
        elif found_inf:
            worker.skip(loss=loss)
        else:
            worker.step(samples=samples, loss=loss, scale=1.0 if scale is None else float(scale))
        self._seen.take()
        self._end_if_preempted()
        return result

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)

    def synchronize(self) -> None:
        """Returns when all parameters of the latest release are in the model; only with `early_forward` does it wait.

        Then it is called before a program reads or writes parameters otherwise than by running the model or by
        `state_dict`.
        """
        worker = self._need_worker("synchronize")
        if isinstance(worker, Worker):
            worker.finish()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the ranks have agreed on the groups."""
        if hasattr(self, "_replica"):
            raise ConfigError("parameter groups are agreed on at the start: add them to the torch optimizer before")
        super().add_param_group(param_group)

    def track(self, data: Positioned) -> None:
        """Makes the position of this worker's `data` part of checkpoints, and puts it where a resumed run has come to.

        Args:
            data: a stalempi.DataLoader with a DistributedSampler, or the sampler; not iterated yet.
        """
        self._need_worker("track")
        if self._notebook:
            self._notebook.track(data)

    def _end_if_preempted(self) -> None:
        if self._worker and self._worker.preempted:
            self.close()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the model's state_dict as it is now, running statistics combined (server only).

        Where there is no server, any rank may call it; the running statistics are this rank's own until `close`.
        """
        if not isinstance(self._worker, Peer):
            server = self._need_server("snapshot")
            server.combine_buffers()
            server.gather()
        return {name: value.detach().clone() for name, value in self._replica.model.state_dict().items()}

    def serve(self) -> RunStats:
        """Serves until every worker has left; the model then holds the result (server only).

        Raises Preempted, which ends the program with code 75, if a signal has asked any rank to stop (`step` on workers
        does, too).
        """
        if self._closed:
            raise ConfigError("this optimizer has served already: construct another one for another job")
        if isinstance(self._server, Follower):
            return self._follow(self._server)
        server = self._need_server("serve")
        stats = server.serve()
        self._closed = True
        if self._keeper and self._keeper.stopped:
            if self._gallery:
                self._gallery.abandon()
            contexts.open_jobs.remove(self)
            self._keeper.say_why()
            raise preempt.Preempted
        if not isinstance(self._gallery, Exhibition):
            contexts.open_jobs.remove(self)
        return stats

    def _follow(self, server: Follower) -> RunStats:
        stats = server.serve()
        self._closed = True
        contexts.open_jobs.remove(self)
        if server.draining:
            raise preempt.Preempted
        return stats

    def evaluate(self) -> Evaluation:
        """Returns what was measured along the way, see `curve`; for the evaluator, and for the server after `serve`.

        The evaluator measures what the server sends it until training is over, while that goes on. Without one the
        server measures here what it has kept; so does rank 0, after `close`, where there is no server. The model is the
        final one when this returns.
        """
        evaluation = self._evaluation
        works = self._worker and not (isinstance(self._worker, Peer) and self._context.rank == 0)
        if evaluation is None or works or not (self._closed or self._critic):
            raise ConfigError(
                "evaluate needs evaluation=..., and is for the server after serve and for the evaluator "
                "(without a server, for rank 0 after close)"
            )
        if self._evaluated:
            return evaluation
        self._evaluated = True
        if self._critic:
            if self._critic.run():
                self._retire()
                raise preempt.Preempted
        elif self._gallery:
            self._gallery.finish()
        if self in contexts.open_jobs:
            self._retire()
        return evaluation

    def close(self) -> None:
        """Leaves the job: nobody waits for this worker any more. Does nothing a second time, or on the server.

        Raises Preempted if the job is asked to stop before this worker has left.
        """
        if not self._worker or self._closed:
            return
        self._worker.leave()
        self._retire()
        if not self._worker.preempted:
            return
        if isinstance(self._worker, Peer) and self._context.rank == 0:
            preempt.say_why(None, self.global_samples, "no checkpoint, since there is no server")
        raise preempt.Preempted

    def finish(self) -> None:
        """Closes what the program left open when it ended."""
        if self._worker:
            self.close()
        elif self._server and not self._closed:
            raise ConfigError("the server's program ended without optimizer.serve(), and the workers wait for it")
        else:
            raise ConfigError(f"the {self._context.role}'s program ended without optimizer.evaluate(): call it last")

    def _retire(self) -> None:
        self._closed = True
        self._take_role(self._context, self._outer)
        contexts.open_jobs.remove(self)

    @staticmethod
    def _take_role(before: Context, after: Context) -> None:
        """Makes `after` this rank's context for everybody, if `before` is."""
        if contexts.is_initialized() and contexts.current() is before:
            contexts.set_current(after)

    def __enter__(self) -> DistributedOptimizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a release that is owed has been waited for already; a leader would go on for its group, and not fail
        fruitless = error is not None and self._worker and (self._worker.owed or self._context.role.takes_from)
        if not (fruitless or isinstance(error, SystemExit)):  # what an exit means is judged at the end of the program
            self.close()

    def _need_server(self, what: str) -> Server:
        if not isinstance(self._server, Server):
            who, known = ("rank 0", "stalempi.rank()") if self._server else ("the server", "stalempi.is_server()")
            raise ConfigError(f"{what} is for {who}, but this is {self._context.role}: see {known}")
        return self._server

    def _need_keeper(self, what: str) -> Keeper:
        self._need_server(what)
        assert self._keeper is not None
        return self._keeper

    def _need_worker(self, what: str) -> Worker | Peer:
        if self._worker is None or self._closed:
            raise ConfigError(f"{what} is for a worker that has not left; this rank is {self._context.role}")
        return self._worker

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("a DistributedOptimizer cannot be copied or pickled: save the model's state_dict instead")


def _check_job(
    policy: Policy,
    role: Role,
    correction: Correction | None,
    checkpoint: Checkpoint | None,
    overlap: str,
    compression: str,
) -> None:
    """Raises ConfigError if these do not go together."""
    if overlap not in OVERLAPS:
        raise ConfigError(f"overlap must be one of {', '.join(OVERLAPS)}, got {overlap!r}")
    check_groups(policy, role.group_size)
    if correction and not policy.has_server:
        raise ConfigError(f"correction {correction.name} has nothing to mend: under {policy} no gradient is stale")
    if compression != "none" and not policy.has_server:
        raise ConfigError(f"compression {compression}: MPI adds up under {policy}, and cannot read it: leave it out")
    if checkpoint and not policy.has_server:
        raise ConfigError(f"the server saves a run, and {policy} has none: leave checkpoint out")


def _may_be_sparse(policy: Policy, role: Role, correction: Correction | None, clip: Clip | None) -> bool:
    """Whether gradients that are sparse rows may stay so: all that is done to them is to add them up and to step."""
    return (
        policy.has_server
        and role.group_size == 1
        and correction is None
        and clip is None
        and not isinstance(policy, CachedSSP)
    )


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a profiler runs, or somebody wants to be called before or after each step."""
    return bool(
        torch._C._autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or hooks._global_optimizer_pre_hooks
        or hooks._global_optimizer_post_hooks
    )


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
        raise ConfigError(f"optimizer must be a plain torch optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS needs a closure on the server, which has no data: use SGD, Adam or another")


def _inside(model: nn.Module) -> nn.Module:
    """Returns the model that torch.compile wrapped, or `model` itself."""
    inside = getattr(model, "_orig_mod", model)
    return inside if isinstance(inside, nn.Module) else model
