"""Wraps a torch optimizer so that its steps are taken by the server."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from stalempi import context as contexts
from stalempi.clip import Clip
from stalempi.context import Context
from stalempi.correction import Correction
from stalempi.errors import ConfigError
from stalempi.policy.base import Decision, Event, Policy
from stalempi.replica import DEFAULT_BUCKET_BYTES, Replica, difference
from stalempi.server import Server, ServerOptions
from stalempi.silence import default_stall_timeout
from stalempi.stats import RunStats
from stalempi.train.samples import count_samples
from stalempi.worker import Worker

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
        policy: when a worker may go on: BSP(), ASP(), SSP(bound), DSSP(lower, upper).
        total_samples: global samples after which `done` becomes true on workers; None: no limit.
        schedule: factor of the learning rate as a function of global samples, the same for every policy.
        nonfinite: "raise" ends the job at a gradient with NaN or infinity, "skip" counts it and goes on.
        clip_norm, clip_value: largest 2-norm and largest element of each gradient that the server applies: under BSP
            the mean of all workers', else one worker's. By value comes first.
        correction: mends stale gradients on the server; see `stalempi.correction` for what each costs.
        bucket_bytes: about how many bytes one message carries.
        stall_timeout: seconds after which a silent rank ends the job; STALEMPI_STALL_TIMEOUT or 600 by default.
        context: the rank to be; the one of `init` by default.
        observe: called on the server with each event and the decisions that followed.

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
        stall_timeout: float | None = None,
        context: Context | None = None,
        observe: Callable[[Event, list[Decision]], None] | None = None,
    ) -> None:
        self._context = context or contexts.current()
        _check_optimizer(optimizer)
        timeout = stall_timeout if stall_timeout is not None else default_stall_timeout()
        clip = Clip(clip_norm, clip_value) if (clip_norm, clip_value) != (None, None) else None
        options = ServerOptions(total_samples, schedule, nonfinite, min(60.0, timeout / 2), timeout, clip=clip)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self._replica = Replica(_inside(model), optimizer, bucket_bytes=bucket_bytes)
        self._closed = False
        self._join(
            [
                f"policy {policy}",
                f"total_samples {total_samples}",
                f"nonfinite {nonfinite}",
                f"clip_norm {clip_norm}, clip_value {clip_value}",
                f"correction {correction.name if correction else None}",
            ],
            timeout,
        )
        self._server: Server | None = None
        self._worker: Worker | None = None
        if self._context.is_server:
            self._server = Server(
                self._replica, policy, self._context.transport, options=options, correction=correction, observe=observe
            )
        else:
            self._worker = Worker(
                self._replica, self._context.transport, stall_timeout=2 * timeout, schedule=schedule, clip=clip
            )
            self._seen = count_samples(self._replica.model)
        contexts.open_jobs.append(self)

    def _join(self, options: list[str], timeout: float) -> None:
        """Makes sure that all ranks mean the same, and gives all of them rank 0's weights."""
        transport = self._context.transport
        text = "\n".join([*options, *self._replica.describe()]).encode()
        digests = transport.allgather(hashlib.sha256(text).digest(), timeout)
        if len(set(digests)) > 1:
            raise ConfigError(f"the ranks differ: {difference(transport.allgather(text, timeout))}")
        transport.broadcast(self._replica.state(), timeout)

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
    def done(self) -> bool:
        """Whether `total_samples` have been applied: time for a worker to leave its loop."""
        return self._worker is not None and self._worker.stopping

    @property
    def stats(self) -> RunStats:
        """What has happened so far (server only)."""
        return self._need_server("stats").stats

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
        worker = self._need_worker("step")
        result: T | None = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            if isinstance(result, (float, torch.Tensor)):
                loss = float(result.detach()) if isinstance(result, torch.Tensor) else result
        seen = self._seen.take()
        if float(getattr(self, "found_inf", 0.0)):
            worker.skip(loss=loss)
        else:
            scale = getattr(self, "grad_scale", None)
            scale = 1.0 if scale is None else float(scale)
            worker.step(samples=samples if samples is not None else max(1, seen), loss=loss, scale=scale)
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the ranks have agreed on the groups."""
        if hasattr(self, "_replica"):
            raise ConfigError("parameter groups are agreed on at the start: add them to the torch optimizer before")
        super().add_param_group(param_group)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the model's state_dict as it is now, running statistics combined (server only)."""
        self._need_server("snapshot").combine_buffers()
        return {name: value.detach().clone() for name, value in self._replica.model.state_dict().items()}

    def serve(self) -> RunStats:
        """Serves until every worker has left; the model then holds the result (server only)."""
        server = self._need_server("serve")
        if self._closed:
            raise ConfigError("this optimizer has served already: construct another one for another job")
        stats = server.serve()
        self._retire()
        return stats

    def close(self) -> None:
        """Leaves the job: nobody waits for this worker any more. Does nothing a second time, or on the server."""
        if self._worker and not self._closed:
            self._worker.leave()
            self._retire()

    def finish(self) -> None:
        """Closes what the program left open when it ended."""
        if self._worker:
            self.close()
        elif not self._closed:
            raise ConfigError("the server's program ended without optimizer.serve(), and the workers wait for it")

    def _retire(self) -> None:
        self._closed = True
        contexts.open_jobs.remove(self)

    def __enter__(self) -> DistributedOptimizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fruitless = error is not None and self._worker is not None and self._worker.owed  # it has waited for it already
        if not (fruitless or isinstance(error, SystemExit)):  # what an exit means is judged at the end of the program
            self.close()

    def _need_server(self, what: str) -> Server:
        if self._server is None:
            raise ConfigError(f"{what} is for the server, but this is {self._context.role}: see stalempi.is_server()")
        return self._server

    def _need_worker(self, what: str) -> Worker:
        if self._worker is None or self._closed:
            raise ConfigError(f"{what} is for a worker that has not left; this rank is {self._context.role}")
        return self._worker

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("a DistributedOptimizer cannot be copied or pickled: save the model's state_dict instead")


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
        raise ConfigError(f"optimizer must be a plain torch optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS needs a closure on the server, which has no data: use SGD, Adam or another")


def _inside(model: nn.Module) -> nn.Module:
    """Returns the model that torch.compile wrapped, or `model` itself."""
    inside = getattr(model, "_orig_mod", model)
    return inside if isinstance(inside, nn.Module) else model
