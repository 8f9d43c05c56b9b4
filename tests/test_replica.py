"""A replica lays the model out, carries hyper-parameters as numbers, and says how ranks differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stalempi.errors import ConfigError
from stalempi.flat import Flat
from stalempi.replica import Replica, difference
from stalempi.transport.message import HEADER_BYTES


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
    packet = replica.push_packet(replica.wire(replica.params.like()), replica.buffers)
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


def test_whole_and_tensor_numbers_come_back_as_such() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.25, max_iter=7)
    replica = make(model, optimizer)
    group = optimizer.param_groups[0]
    values = replica.read_hyper()
    group["max_iter"] = 1
    replica.write_hyper(values)
    assert (type(group["max_iter"]), group["max_iter"]) == (int, 7)
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    replica = make(model, adam)
    replica.write_hyper(replica.read_hyper())
    assert torch.equal(torch.as_tensor(adam.param_groups[0]["lr"]), torch.tensor(0.5))


def test_hyper_parameters_and_flags_have_places_of_their_own_behind_the_header() -> None:
    replica = make(nn.Linear(3, 2))
    packet = replica.push_packet(replica.wire(replica.params.like()), replica.buffers)
    replica.hyper(packet.header)[:] = replica.read_hyper()
    replica.touched(packet.header)[:] = [True, False]
    assert replica.hyper(packet.header).tolist() == replica.read_hyper()
    assert replica.touched(packet.header).tolist() == [True, False]
    assert not any(packet.header[:HEADER_BYTES])


def mixed(seed: int) -> Replica:
    """Makes a model with trained, untrained (one of them strided, one a scalar) and counted parts."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 2).to(memory_format=torch.channels_last)
    )
    model.register_parameter("scale", nn.Parameter(torch.randn(()), requires_grad=False))
    model[1](torch.randn(seed + 2, 4, 3, 3))
    return make(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_the_state_at_joining_is_the_whole_model() -> None:
    servers, workers = mixed(1), mixed(2)
    for source, target in zip(servers.state().tensors, workers.state().tensors, strict=True):
        target.copy_(source)
    ours, theirs = servers.model.state_dict(), workers.model.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_frozen_parameter_is_described_as_such() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert [line.endswith(" frozen") for line in make(model).describe() if line.startswith("parameter")] == [
        False,
        True,
    ]


def test_a_difference_in_order_or_in_many_lines_stays_one_clause() -> None:
    assert difference([b"a\nb", b"b\na"]) == "rank 1 has another order where rank 0 has another order"
    assert difference([b"a", b"a\nb\nc\nd\ne\nf"]).startswith("rank 1 has 'b', 'c', 'd' and 2 more where rank 0")
    assert difference([b"a", b"a"]) == ""


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


def test_an_optimizer_without_parameters_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ConfigError, match="holds no parameter"):
        make(model, optimizer)


@pytest.mark.parametrize(("share", "words"), [((0, 1), "no elements$"), ((1, 2), "of server 1: take fewer servers")])
def test_parameters_without_elements_are_refused(share: tuple[int, int], words: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(5 * share[0])), nn.Parameter(torch.ones(0))])
    with pytest.raises(ConfigError, match=words):
        Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=64, share=share)


def test_a_bucket_of_no_bytes_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="bucket_bytes must be at least 1, got 0"):
        Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=0)


def test_gradients_share_the_layout_of_parameters() -> None:
    replica = make(nn.Linear(3, 2))
    gradients = replica.params.like()
    assert isinstance(gradients, Flat)
    assert [view.shape for view in gradients.views] == [p.shape for p in replica.trained]


def test_a_hyper_parameter_given_as_a_list_travels_too() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), betas=[0.5, 0.6])  # type: ignore[arg-type]
    replica = make(model, optimizer)
    values = replica.read_hyper()
    optimizer.param_groups[0]["betas"] = [0.0, 0.0]
    replica.write_hyper(values)
    assert optimizer.param_groups[0]["betas"] == [0.5, 0.6]
