"""Is one block of a pipeline: forward, recompute, backward, update, with the weights that the method asks for."""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stalempi.errors import ConfigError, NonFiniteError
from stalempi.pipeline.link import Key
from stalempi.pipeline.modes import evaluating
from stalempi.pipeline.schedules import Schedule
from stalempi.pipeline.update import Updater
from stalempi.pipeline.weights import Weights

__all__ = ["Block", "Loss", "Tensors"]

Tensors = tuple[Tensor, ...]
Loss = Callable[..., Tensor]
Pace = Callable[[], None]
_LOSSES = 1000  # kept, of a run that may take millions


@dataclass
class _Held:
    """What a block keeps of a batch between its forward and its backward."""

    inputs: Tensors
    outputs: Tensors | None
    version: int
    recomputing: Future[Tensors] | None = None


class Block:
    """One block of the model, on the rank that it is pinned to.

    Args:
        module: its layers, on the device where it computes.
        number, blocks: which block of how many.
        schedule: the method.
        updater: what takes its optimizer steps.
        loss: of the last block: `loss(output, labels)`, a mean over samples.
        running_stats: which pass updates the running statistics of normalisation layers where a block recomputes, so
            that a batch updates them once: "recompute" (as PETRA does) or "forward".
        autocast: dtype of `torch.autocast` around forward and recompute; None: off.
        seed: of what is random in a forward (dropout): block, batch and this give the stream.

    Attributes:
        staleness: how many backwards came so many updates after the weights of their forward.
        losses: on the last block, of the batches that came through last: means over the samples of each.
        most_held: the most batches or micro-batches between their forward and their backward at once.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        module: nn.Module,
        number: int,
        blocks: int,
        schedule: Schedule,
        updater: Updater,
        *,
        loss: Loss | None = None,
        running_stats: str = "recompute",
        autocast: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        if running_stats not in ("recompute", "forward"):
            raise ConfigError(f"running_stats must be 'recompute' or 'forward', got {running_stats!r}")
        self.module, self.number, self.blocks, self.updater = module, number, blocks, updater
        self.staleness: Counter[int] = Counter()
        self.losses: deque[float] = deque(maxlen=_LOSSES)
        self._parts: list[tuple[float, int]] = []  # losses and samples of the micro-batches of one batch
        self.most_held = 0
        self._schedule, self._loss, self._autocast, self._seed = schedule, loss, autocast, seed
        self._keeps_graph = schedule.keeps_graph(number, blocks)
        stash = schedule.stashes and schedule.delay(number, blocks) > 0
        self.weights = Weights(updater.parameters, stash=stash, two=stash and schedule.two_versions)
        self._held: dict[Key, _Held] = {}
        self._draws_from_torch = blocks == 1 and self._keeps_graph  # as plain training does
        self._clones_input: bool | None = None
        self._is_random = False
        self._other = twin = module if self._keeps_graph else _twin(module)
        self._in_forward = module if self._keeps_graph or running_stats == "forward" else twin
        self._in_recompute = twin if running_stats == "forward" else module
        self._on_gpu = on_gpu = any(p.is_cuda for p in module.parameters())
        overlaps = schedule.overlaps and not self._keeps_graph
        self._side = torch.cuda.Stream() if on_gpu and overlaps else None
        self._pool = ThreadPoolExecutor(1, f"recompute-{number}") if overlaps and not on_gpu else None

    @property
    def is_first(self) -> bool:
        """Whether it takes the data in."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.number == self.blocks - 1

    def forward(self, key: Key, inputs: Tensors) -> Tensors:
        """Computes the block's outputs of a batch, detached, and keeps what its backward will need.

        Args:
            key: the batch.
            inputs: each of shape (samples, ...); the block's own from here on.
        """
        version = self.weights.pin(key[0])
        weights = self.weights.of(version)
        if self._keeps_graph:
            inputs = self._leaves(inputs)
        with self._randomness(key), torch.set_grad_enabled(self._keeps_graph):
            outputs = self._run(self._in_forward, inputs, weights)
        self._held[key] = _Held(inputs, outputs if self._keeps_graph else None, version)
        self.most_held = max(self.most_held, len(self._held))
        return tuple(output.detach() for output in outputs)

    def recompute(self, key: Key, pace: Pace | None = None) -> None:
        """Computes the outputs of a batch again with the weights of now, beside what follows if the method overlaps.

        `pace` is called where the computation ran, once it is done.
        """
        held = self._held[key]

        def work() -> Tensors:
            held.inputs = self._leaves(held.inputs)
            with torch.enable_grad():
                outputs = self._run(self._in_recompute, held.inputs, self.weights.parameters)
            if pace:
                pace()
            return outputs

        if self._pool and not self._is_random:
            held.recomputing = self._pool.submit(work)
        elif self._side:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side), self._randomness(key):
                held.outputs = work()
        else:  # torch's random numbers have one stream, which two passes at once cannot share
            with self._randomness(key):
                held.outputs = work()

    def backward(self, key: Key, gradients: Tensors) -> Tensors:
        """Computes the vector-Jacobian product of a batch and adds the weights' part to what the next update takes.

        Args:
            key: the batch.
            gradients: of the loss by each output of floating point, as the block above sent them; the labels on the
                last block.

        Returns the gradients by the inputs of floating point, for the block below; () on the first block.
        """
        self._settle(key)
        held = self._held.pop(key)
        assert held.outputs is not None, "a backward needs a forward or a recompute"
        self.staleness[self.weights.version - held.version] += 1
        targets, seeds = self._targets(held.outputs, gradients, len(held.inputs[0]))
        weights = self.weights.of(held.version)
        inputs = [x for x in held.inputs if x.requires_grad]
        found: Sequence[Tensor | None] = [None] * (len(inputs) + len(weights))
        if targets and found:
            found = torch.autograd.grad(targets, [*inputs, *weights.values()], seeds, allow_unused=True)
        self.updater.gather(dict(zip(weights, found[len(inputs) :], strict=True)), len(held.inputs[0]))
        self.weights.unpin(held.version)
        below = zip(inputs, found[: len(inputs)], strict=True)
        return tuple(torch.zeros_like(x) if gradient is None else gradient for x, gradient in below)

    def update(self) -> None:
        """Takes one optimizer step with what has been gathered."""
        self.updater.step()
        self.weights.updated()

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over a module's state_dict, in both passes; RuntimeError if it is of another module."""
        self.module.load_state_dict(state)
        for copied, own in zip(self._other.buffers(), self.module.buffers(), strict=True):
            copied.copy_(own)

    def random_state(self) -> list[Tensor]:
        """Returns the state of torch's own random numbers if the block draws from them, [] if it has its own."""
        if not self._draws_from_torch:
            return []
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._on_gpu else [])]

    def set_random_state(self, states: Sequence[Tensor]) -> None:
        """Brings torch's random numbers to where `random_state` found them."""
        for state, place in zip(states, (torch.set_rng_state, torch.cuda.set_rng_state), strict=False):
            place(state)

    def evaluate(self, inputs: Tensors) -> Tensors:
        """Returns the block's outputs in evaluation mode; nothing is kept."""
        with evaluating(self.module), torch.no_grad():
            return self._run(self.module, inputs, self.weights.parameters)

    def _settle(self, key: Key) -> None:
        held = self._held[key]
        if held.recomputing is not None:
            held.outputs, held.recomputing = held.recomputing.result(), None
        elif self._side:
            torch.cuda.current_stream().wait_stream(self._side)

    def _targets(self, outputs: Tensors, gradients: Tensors, samples: int) -> tuple[list[Tensor], list[Tensor] | None]:
        if not self.is_last:
            floating = [output for output in outputs if output.is_floating_point()]
            pairs = [(o, g) for o, g in zip(floating, gradients, strict=True) if o.requires_grad]
            return [o for o, _ in pairs], [g for _, g in pairs]
        assert self._loss is not None, "the last block has a loss"
        with self._casting(outputs[0].device):
            loss = self._loss(*outputs, *gradients)
        self._note_loss(float(loss.detach()), samples)
        return [self.updater.scale_loss(loss)], None

    def _note_loss(self, loss: float, samples: int) -> None:
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss is {loss}: training diverged; lower the learning rate")
        self._parts.append((loss, samples))
        if len(self._parts) == self._schedule.micro_batches:
            total = sum(samples for _, samples in self._parts)
            # a share first: the only part of a batch has exactly its own loss
            self.losses.append(sum(loss * (samples / total) for loss, samples in self._parts))
            self._parts.clear()

    def _leaves(self, inputs: Tensors) -> Tensors:
        """Makes the inputs those that gradients are taken by; the data of the first block needs none."""
        if self.is_first:
            return inputs
        return tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)

    def _run(self, module: nn.Module, inputs: Tensors, weights: Mapping[str, Tensor]) -> Tensors:
        arguments = inputs if self._clones_input is False else tuple(x.clone() for x in inputs)
        versions = [x._version for x in arguments]
        with self._casting(inputs[0].device):
            found = (
                module(*arguments)
                if weights is self.weights.parameters
                else functional_call(module, dict(weights), arguments)
            )
        # a first layer that works in place would spoil what is stored
        if self._clones_input is None and module.training:
            self._clones_input = versions != [x._version for x in arguments]
        outputs = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if not outputs or not all(isinstance(output, Tensor) for output in outputs):
            kinds = ", ".join(type(output).__name__ for output in outputs)
            raise ConfigError(f"block {self.number} returns ({kinds}): a block has to return tensors; cut elsewhere")
        return outputs

    @contextmanager
    def _casting(self, device: torch.device) -> Iterator[None]:
        on = self._autocast is not None
        # threads share the cache of cast weights; older torch also puts there those of a forward without a graph, which
        # would leave the weights of a recompute beside it without gradients
        cached = on and self._pool is None
        with torch.autocast(device.type, self._autocast or torch.bfloat16, enabled=on, cache_enabled=cached):
            yield

    @contextmanager
    def _randomness(self, key: Key) -> Iterator[None]:
        """Gives a batch the same random numbers in forward and recompute, on any rank; torch's own stream stays."""
        if self._draws_from_torch:
            yield
            return
        devices = [torch.cuda.current_device()] if self._on_gpu else []
        seed = hash((self._seed, self.number, *key)) & (2**63 - 1)
        with torch.random.fork_rng(devices=devices):
            # not torch.manual_seed: that asks after every kind of accelerator, half a millisecond in each pass
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
            before = None if self._is_random else torch.get_rng_state()
            yield
            self._is_random = before is None or not torch.equal(before, torch.get_rng_state())


def _twin(module: nn.Module) -> nn.Module:
    """Copies a module, but for its parameters, so that a pass through the copy leaves the running statistics alone."""
    if not any(True for _ in module.buffers()):
        return module
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
