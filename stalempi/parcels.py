"""Sends plain values with tensors among them over a link, such as an optimizer's state; nothing is pickled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stalempi.packing import pack, unpack
from stalempi.pipeline.link import Receiver, Sender

__all__ = ["receive_value", "send_value"]


def send_value(sender: Sender, number: int, value: Any) -> None:
    """Sends `value`, see `packing.pack`, as message `number` of the link; returns when it is on its way.

    The lane must take messages of any size. StallError if nobody takes it.
    """
    text, tensors = pack(value)
    sender.send((number, 0), [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)])
    for place, tensor in enumerate(tensors, start=1):
        sender.send((number, place), [tensor])
    sender.flush()


def receive_value(receiver: Receiver, number: int) -> Any:
    """Returns what `send_value` sent as `number`; ProtocolError if something else came, StallError if nothing did."""

    def fill(empty: list[Tensor]) -> None:
        for place, tensor in enumerate(empty, start=1):
            (values,) = receiver.receive((number, place))
            tensor.copy_(values)

    (text,) = receiver.receive((number, 0))
    return unpack(text.numpy().tobytes().decode(), fill)
