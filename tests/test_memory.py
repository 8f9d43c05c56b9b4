"""A server holds parameters, optimizer state and one receive buffer for each worker, and says so."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from stalempi.context import Context
from stalempi.holder import Holder
from stalempi.memory import server_memory
from stalempi.policy import ASP
from stalempi.replica import Replica
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.transport.inproc import InprocTransport, run_ranks

from .job import make_context

SIZE, WORKERS = 300, 3


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE))


def held(optimizer: torch.optim.Optimizer, compression: str = "none") -> dict[str, int]:
    """Returns what rank 0 says after a few steps of all workers."""

    def main(transport: InprocTransport) -> dict[str, int]:
        context: Context = make_context(transport)
        model = make_model()
        inner = type(optimizer)(model.parameters(), **optimizer.defaults)
        wrapped = DistributedOptimizer(
            inner, model=model, policy=ASP(), context=context, stall_timeout=20.0, compression=compression
        )
        if context.is_server:
            wrapped.serve()
            return wrapped.memory
        with wrapped:
            for _ in range(3):
                wrapped.zero_grad()
                model(torch.randn(4, SIZE)).sum().backward()
                wrapped.step()
        return {}

    return run_ranks(main, 1 + WORKERS)[0]


@pytest.mark.parametrize("copies", [0, 1, 2], ids=["SGD", "momentum", "Adam"])
def test_a_server_needs_parameters_state_and_a_receive_buffer_for_each_worker(copies: int) -> None:
    parameters = list(make_model().parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9 if copies else 0.0)
    if copies == 2:
        optimizer = torch.optim.Adam(parameters, lr=0.01)
    found = held(optimizer)
    gradient = sum(p.nbytes for p in parameters)
    assert gradient <= found["parameters"] <= 1.02 * gradient or found["parameters"] % gradient < 0.05 * gradient
    assert copies * gradient <= found["optimizer"] <= copies * 1.02 * gradient + 64
    assert WORKERS * gradient <= found["receive"] <= 1.02 * WORKERS * gradient
    assert found["decoded"] == found["correction"] == 0
    assert 0 < found["statistics"] < 0.02 * WORKERS * gradient


def test_compressed_pushes_need_less_to_arrive_and_as_much_again_to_be_read() -> None:
    found = held(torch.optim.SGD(make_model().parameters(), lr=0.01), "fp16")
    assert found["receive"] < 0.55 * found["decoded"]


def test_the_statement_is_what_torch_has_allocated() -> None:
    """All float32 tensors of at least a gradient's size that live after a job's start, those of its workers apart."""
    gc.collect()
    transport = InprocTransport.group(1 + WORKERS)[0]
    model = make_model()
    before = _storages()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), bucket_bytes=1 << 20)
    holder = Holder(replica, transport)
    for _ in range(2):
        for slot in holder.slots:
            slot.touched[:] = True
        holder._stepper.step(holder.slots[0].gradients, holder.slots[0].touched)
    gc.collect()
    after = _storages()
    new = sum(storage.nbytes() for pointer, storage in after.items() if pointer not in before)
    stated = sum(server_memory(holder).values())
    assert new == pytest.approx(stated, rel=0.03)


def _storages() -> dict[int, torch.UntypedStorage]:
    """Returns all memory of tensors, by its address; while it is kept, no other can have that address."""
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.device.type == "cpu"]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in dense}
