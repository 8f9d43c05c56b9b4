"""Turns plain values with tensors among them into text and bytes, and back; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stalempi.errors import ConfigError

__all__ = ["pack", "unpack"]


def pack(value: Any) -> tuple[str, list[Tensor]]:
    """Returns `value` as JSON and the tensors in it, contiguous, in the order in which the text names them.

    Takes None, booleans, numbers, text, lists, tuples, dicts with such keys, and dense tensors; ConfigError otherwise.
    """
    tensors: list[Tensor] = []
    return json.dumps(_encode(value, tensors, "the object")), tensors


def unpack(text: str, fill: Callable[[list[Tensor]], None]) -> Any:
    """Returns the value; `fill` is called once with the empty tensors of all its places, to fill them in."""
    tensors: list[Tensor] = []
    value = _decode(json.loads(text), tensors)
    fill(tensors)
    return value


def _encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ConfigError(f"{where} is a {value.layout} tensor: only dense ones can be sent")
        tensors.append(value.detach().contiguous())
        return {"tensor": list(value.shape), "dtype": str(value.dtype)[6:], "device": value.device.type}
    if type(value) in (list, tuple):
        items = [_encode(item, tensors, f"{where}[{n}]") for n, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            if key is not None and type(key) not in (bool, int, float, str):
                raise ConfigError(f"{where} has a key of type {type(key).__name__}: use text or numbers")
            pairs.append([key, _encode(item, tensors, f"{where}[{key!r}]")])
        return {"dict": pairs}
    raise ConfigError(
        f"{where} is of type {type(value).__name__}: only None, booleans, numbers, text, lists, tuples, dicts and "
        "tensors can be sent, since nothing is pickled"
    )


def _decode(code: Any, tensors: list[Tensor]) -> Any:
    if isinstance(code, list):
        return [_decode(item, tensors) for item in code]
    if not isinstance(code, dict):
        return code
    if "tuple" in code:
        return tuple(_decode(item, tensors) for item in code["tuple"])
    if "dict" in code:
        return {key: _decode(item, tensors) for key, item in code["dict"]}
    empty = torch.empty(code["tensor"], dtype=getattr(torch, code["dtype"]), device=code["device"])
    tensors.append(empty)
    return empty
