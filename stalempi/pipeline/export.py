"""Splits a model that is not sequential, by torch.export and torch's own splitter, at modules given by name.

What crosses a boundary may be several tensors: a block takes them as arguments and returns a tensor or a tuple. The
state_dict keys stay those of the model.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from stalempi.errors import ConfigError
from stalempi.pipeline.modes import evaluating, keeping_modes
from stalempi.pipeline.split import Blocks, part_ties

__all__ = ["split_exported"]

# They behave otherwise in training than in evaluation, or draw random numbers: traced, they would be fixed.
FIXED = re.compile(r"aten\.(_?\w*batch_norm\w*|\w*dropout\w*|bernoulli\w*|(rand|normal)\w*)\.")


def split_exported(model: nn.Module, sample: tuple[Tensor, ...], points: Sequence[str]) -> Blocks:
    """Cuts `model` before each of its modules named in `points`; it is used up, as by `split`.

    Args:
        model: any that torch.export can trace.
        sample: arguments of one forward, on the model's device. Their sizes are fixed where the model reads them, so
            take the batch size of training.
        points: names of modules, as in `layer2.0`.

    Modules that take one argument and hold no others (convolutions, BatchNorm, dropout) are in the blocks themselves,
    so that `train()` and `eval()` reach them, and stay in the mode they are in; the code between them is traced in
    training mode.

    Raises ConfigError if a point is none, the model cannot be traced, a value is used beyond the next block, or
    evaluation could not be told from training.
    """
    names = {name for name, _ in model.named_modules() if name}
    for point in points:
        if point not in names:
            close = get_close_matches(point, sorted(names), n=1)
            raise ConfigError(
                f"split point {point!r} is no module of the model" + f": did you mean {close[0]}?" * len(close)
            )
    if not points or len(set(points)) < len(points):
        raise ConfigError(f"split points {list(points)}: give at least one, each once")
    with keeping_modes(model):
        return _split(model, sample, points)


def _split(model: nn.Module, sample: tuple[Tensor, ...], points: Sequence[str]) -> Blocks:
    with torch.no_grad():
        expected = _leaves(model.eval()(*sample))
    pipe = _traced(model.train(), sample, points)
    if pipe.num_stages != len(points) + 1:
        raise ConfigError(
            f"split points {list(points)} make {pipe.num_stages} blocks: give modules that run once, apart"
        )
    blocks = [pipe.get_stage_module(number) for number in range(pipe.num_stages)]
    _connect(pipe.split_gm, blocks)
    for block in blocks:
        _put_back(block, model)
        _drop_unused(block)
        _refuse_fixed(block)
    keys = Counter(key for block in blocks for key in block.state_dict())
    if strange := {key for key in keys if keys[key] > 1} | (keys.keys() ^ model.state_dict().keys()):
        raise ConfigError(
            f"{min(strange)} is not in exactly one block: let each module, and each parameter, be used in one place"
        )
    _compare(blocks, sample, expected)
    return Blocks(tuple(blocks), part_ties(blocks), ())


def _traced(model: nn.Module, sample: tuple[Tensor, ...], points: Sequence[str]) -> Any:
    try:
        from torch.distributed.pipelining import SplitPoint, pipeline  # noqa: PLC0415  (torch 2.4; takes a second)
    except ImportError as failure:
        raise ConfigError(
            f"torch {torch.__version__} has no torch.distributed.pipelining: install 2.4 or newer"
        ) from failure
    try:
        return pipeline(model, sample, split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
    except Exception as failure:  # whatever the tracer says, the model is not for it
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        raise ConfigError(
            f"torch.export cannot trace this {type(model).__name__} ({reason}): make it nn.Sequential"
        ) from failure
    finally:
        for point in points:  # the splitter leaves its marks on them
            for mark in ("forward", "_orig_forward"):
                model.get_submodule(point).__dict__.pop(mark, None)


def _connect(whole: fx.GraphModule, blocks: Sequence[fx.GraphModule]) -> None:
    """Makes each block return exactly what the next one takes, in its order."""
    calls = [node for node in whole.graph.nodes if node.op == "call_module"]
    assert len(calls) == len(blocks)
    for number, (before, after) in enumerate(itertools.pairwise(calls)):
        picked = [_index_of(argument, before) for argument in after.args]
        if None in picked or after.kwargs:
            raise ConfigError(
                f"block {number + 1} takes a value that block {number} does not make: what crosses a boundary must be "
                "used in the next block; choose other split points"
            )
        output = next(node for node in blocks[number].graph.nodes if node.op == "output")
        made = output.args[0]
        if isinstance(made, tuple | list):
            output.args = (tuple(made[index] for index in picked if index is not None),)
            blocks[number].recompile()


def _index_of(argument: Any, call: fx.Node) -> int | None:
    """Returns which result of `call` the argument is, None if it is none."""
    if argument is call:
        return 0
    if isinstance(argument, fx.Node) and argument.target is operator.getitem and argument.args[0] is call:
        index = argument.args[1]
        assert isinstance(index, int)
        return index
    return None


def _put_back(block: nn.Module, model: nn.Module) -> None:
    """Replaces traced modules by the model's own where that has one argument and no parts, so nothing else to lose."""
    own = dict(model.named_modules())
    for name, traced in list(block.named_modules()):
        original = own.get(re.sub(r"@\d+", "", name))
        if not name or original is None or not hasattr(traced, "graph"):
            continue
        if not list(original.children()) and len(inspect.signature(original.forward).parameters) == 1:
            path, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(path), leaf, original)


def _drop_unused(block: nn.Module) -> None:
    """Deletes parameters and buffers that only traced modules used which have been replaced."""
    used = {f"{name}.{node.target}".lstrip(".") for name, node in _traced_nodes(block, "get_attr")}
    for name, module in block.named_modules():
        if type(module) is nn.Module:  # a mere shelf
            for key, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if f"{name}.{key}" not in used:
                    delattr(module, key)


def _refuse_fixed(block: nn.Module) -> None:
    for name, node in _traced_nodes(block, "call_function"):
        if FIXED.match(f"{node.target}.") and not _does_nothing(node):
            raise ConfigError(
                f"{name or 'the model'} calls {node.target} in its forward, which tracing fixes in training mode: "
                "make it a module, such as nn.Dropout"
            )


@torch.no_grad()
def _compare(blocks: Sequence[nn.Module], sample: tuple[Tensor, ...], expected: list[Tensor]) -> None:
    """Refuses blocks that in evaluation do not do what the model did."""
    values: Any = sample
    for block in blocks:
        with evaluating(block):
            made = block(*values)
        values = made if isinstance(made, tuple) else (made,)
    results = _leaves(values)
    same = len(results) == len(expected) and all(
        a.shape == b.shape and float((a - b).norm()) <= 1e-3 * float(b.norm())
        for a, b in zip(results, expected, strict=True)
    )
    if not same:
        raise ConfigError(
            "in evaluation the blocks do not do what the model did: its forward asks for self.training, which tracing "
            "fixes; let modules such as nn.Dropout and nn.BatchNorm2d do that"
        )


def _leaves(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _traced_nodes(block: nn.Module, kind: str) -> Iterator[tuple[str, fx.Node]]:
    for name, module in block.named_modules():
        graph = getattr(module, "graph", None)
        if isinstance(graph, fx.Graph):
            yield from ((name, node) for node in graph.nodes if node.op == kind)


def _does_nothing(node: fx.Node) -> bool:
    return "dropout" in str(node.target) and node.args[1:2] == (0.0,)
