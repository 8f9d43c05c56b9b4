"""Lets a model run forward while the rest of its parameters is still arriving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from stalempi.replica import Replica

__all__ = ["Arrival", "hookable"]

Places = dict[int, int]  # by server, the last place of the parts that are waited for


class Arrival:
    """Makes each module of a model wait for the parameters that it uses, and for no others.

    A module waits for its own parameters, and for those that it was seen to use in the first step, before which all are
    there: nn.MultiheadAttention uses those of a layer that it does not call, an output layer may use those of an
    embedding. What nobody was seen to use is waited for by its module and, if that was not called, by the nearest one
    around it that was.

    Args:
        replicas: the shares of the model, by server.
        wait: (server, place) -> None; returns when the part at `place` of that server's release is in the model.

    Attributes:
        first: what nobody waits for, since not even the whole model is called.
    """

    def __init__(self, replicas: Sequence[Replica], wait: Callable[[int, int], None]) -> None:
        self._model, self._wait = replicas[0].model, wait
        self._last = _last_places(replicas)
        self._called: set[nn.Module] = set()
        self._uses = _Uses(self._last)
        self._needs: dict[nn.Module, Places] = {}
        self._learned = self._compiled = False
        self.first: Places = {}
        self._handles: list[RemovableHandle] = []
        for module in hookable(self._model):
            module.register_forward_pre_hook(self._enter, prepend=True)  # one that computes weights comes after it
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    @property
    def may_begin(self) -> bool:
        """Whether the model may run before all parameters are here: a step has shown who waits for what."""
        return self._learned and not self._compiled

    def learn(self) -> None:
        """Is told that a step has been taken."""
        if self._learned:
            return
        self._learned = True
        for handle in self._handles:
            handle.remove()
        self._compiled = self._compiled or any(module._compiled_call_impl for module in hookable(self._model))
        names = dict(self._model.named_modules(remove_duplicate=False))
        for name, module in names.items():
            for parameter in module.parameters(recurse=False):
                users = self._uses.seen.get(id(parameter), set())
                if not users and module not in self._called:
                    users = {next((names[o] for o in _around(name) if names[o] in self._called), None)}
                for user in {module, *users}:
                    self._add(self.first if user is None else self._needs.setdefault(user, {}), parameter)

    def _add(self, places: Places, parameter: nn.Parameter) -> None:
        if id(parameter) in self._last:
            server, place = self._last[id(parameter)]
            places[server] = max(place, places.get(server, 0))

    def _enter(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            self._compiled = True  # what was traced calls no hook
        elif self._learned:
            for server, place in self._needs.get(module, {}).items():
                self._wait(server, place)
        else:
            self._called.add(module)
            self._uses.enter(module)

    def _leave(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._uses.leave()


def hookable(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of `model`, itself included, that call hooks: those that TorchScript runs do not."""
    return (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))


class _Uses(TorchFunctionMode):
    """Notes which parameters each module's own forward gives to functions of torch.

    Attributes:
        seen: the modules that use a parameter, by its id.
    """

    def __init__(self, watched: Mapping[int, object]) -> None:
        super().__init__()
        self._watched = watched
        self._running: list[nn.Module] = []
        self.seen: dict[int, set[nn.Module | None]] = {}

    def enter(self, module: nn.Module) -> None:
        """Is told that a module's forward begins."""
        if not self._running:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._running.append(module)

    def leave(self) -> None:
        """Is told that the forward of the module that was entered last is over."""
        self._running.pop()
        if not self._running:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in _inside([*args, *kwargs.values()]):
            if id(value) in self._watched:
                self.seen.setdefault(id(value), set()).add(self._running[-1])
        return func(*args, **kwargs)


def _inside(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _inside(value)
        else:
            yield value


def _last_places(replicas: Sequence[Replica]) -> dict[int, tuple[int, int]]:
    """Returns for each parameter, by its id, its server and the last part of a release that has some of it."""
    found: dict[int, tuple[int, int]] = {}
    for server, replica in enumerate(replicas):
        for place, bucket in enumerate(replica.release_buckets()):
            for view in bucket.views:
                found[id(replica.trained[view])] = server, place
    return found


def _around(name: str) -> Iterator[str]:
    """Yields the names of the modules around the one that is called `name`, the nearest first, the whole model last."""
    while name:
        name = name.rpartition(".")[0]
        yield name
