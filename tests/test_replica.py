"""A replica lays the model out, carries hyper-parameters as numbers, and says how ranks differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stalempi.errors import ConfigError
from stalempi.flat import Flat
from stalempi.replica import Replica, difference


def make(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Replica:
    return Replica(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=256)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight


def test_a_tied_parameter_is_held_once_and_stays_tied() -> None:
    model = Tied()
    replica = make(model)
    assert replica.names == ["embedding.weight"]
    assert model.output.weight is model.embedding.weight


def test_a_parameter_without_the_optimizer_travels_only_at_joining() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    replica = make(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert replica.names == ["1.weight", "1.bias"]
    assert replica.release_parts().nbytes == replica.params.nbytes
    assert replica.state().nbytes == replica.params.nbytes + 4 * (9 + 3)


def test_integer_and_floating_buffers_travel_with_a_push() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    replica = make(model)
    assert sorted(str(s.dtype) for s in replica.buffers.storages) == ["torch.float32", "torch.int64"]
    packet = replica.push_packet(replica.params.like(), replica.buffers)
    assert packet.parts.nbytes == replica.params.nbytes + replica.buffers.nbytes


def test_hyper_parameters_come_back_in_the_type_they_had() -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "lr": 0.5},
        {"params": [model.bias], "betas": (0.5, 0.6)},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.1, amsgrad=True)
    replica = make(model, optimizer)
    values = replica.read_hyper()
    for group in optimizer.param_groups:
        group.update(lr=9.0, betas=(0.0, 0.0), amsgrad=False)
    replica.write_hyper(values)
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"]) == (0.5, 0.1)
    assert second["betas"] == (0.5, 0.6)
    assert first["amsgrad"] is True


def test_a_difference_names_the_rank_and_both_lines() -> None:
    texts = ["\n".join(make(nn.Linear(3, size)).describe()).encode() for size in (2, 2, 4)]
    said = difference(texts)
    assert said.startswith("rank 2 has 'parameter weight (4, 3) float32")
    assert "where rank 0 has 'parameter weight (2, 3) float32" in said
    assert "rank 1" not in said


@pytest.mark.parametrize(
    "other",
    [
        lambda: make(nn.Linear(2, 2).double()),
        lambda: make(nn.Linear(2, 2, bias=False)),
        lambda: make(m := nn.Linear(2, 2), torch.optim.Adam(m.parameters())),
        lambda: in_two_groups(nn.Linear(2, 2)),
    ],
    ids=["dtype", "parameters", "optimizer", "groups"],
)
def test_whatever_would_not_fit_on_the_wire_changes_the_layout(other: object) -> None:
    assert callable(other)
    assert other().layout != make(nn.Linear(2, 2)).layout


def in_two_groups(model: nn.Linear) -> Replica:
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    return make(model, torch.optim.SGD(groups, lr=0.1))


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="not in the model"):
        make(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_gradients_share_the_layout_of_parameters() -> None:
    replica = make(nn.Linear(3, 2))
    gradients = replica.params.like()
    assert isinstance(gradients, Flat)
    assert [view.shape for view in gradients.views] == [p.shape for p in replica.trained]
