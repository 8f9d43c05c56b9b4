"""What the ranks that compute tell each other arrives whole, and a rank that calls something else is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stalempi.errors import ConfigError, StallError
from stalempi.packing import pack, unpack
from stalempi.peers import Peers
from stalempi.transport.inproc import run_ranks


def on_each(call: Callable[[Peers, int], Any], ranks: int = 3, timeout: float = 20.0) -> list[Any]:
    """Returns what `call(peers, number)` returned on each rank."""
    return run_ranks(lambda transport: call(Peers(transport, first=1, timeout=timeout), transport.rank), ranks)


@pytest.mark.parametrize(("op", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0)])
def test_numbers_arrays_and_tensors_come_back_as_what_they_were(op: str, expected: float) -> None:
    def call(peers: Peers, number: int) -> list[Any]:
        x = float(number + 1)
        values: list[Any] = [
            x,
            np.float32(x),
            np.full((2, 3), x, dtype=np.float16),
            torch.full((2, 2), x, dtype=torch.float64, requires_grad=True),
            torch.full((2, 3, 4, 4), x, dtype=torch.bfloat16).to(memory_format=torch.channels_last)[:, :, 1],
            torch.tensor(x),
        ]
        results = [peers.allreduce(value, op, None) for value in values]
        assert [type(result) for result in results] == [type(value) for value in values]
        for value, result in zip(values[1:], results[1:], strict=True):
            assert (result.shape, result.dtype) == (value.shape, value.dtype)
        return results

    for results in on_each(call):
        assert all(bool(torch.all(torch.as_tensor(result) == expected)) for result in results)


def test_integers_are_added_exactly_and_their_mean_is_a_float() -> None:
    big = 2**53 + 1

    def call(peers: Peers, number: int) -> list[Any]:
        return [
            peers.allreduce(big if number else 0, "sum", None),
            peers.allreduce(number, "mean", None),
            peers.allreduce(number == 1, "max", None),
            peers.allreduce(
                torch.tensor([number, -number], dtype=torch.uint8 if number < 0 else torch.int16), "sum", None
            ),
        ]

    for total, mean, any_true, tensor in on_each(call, ranks=2):
        assert total == big
        assert mean == 0.5
        assert any_true is True
        assert tensor.tolist() == [1, -1]


def test_half_numbers_are_not_added_in_half() -> None:
    values = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16

    def call(peers: Peers, number: int) -> torch.Tensor:
        return peers.allreduce(values[number : number + 1], "sum", None)

    assert [result.item() for result in on_each(call, ranks=4)] == [260.0] * 4  # 259 rounded


@pytest.mark.parametrize(
    ("value", "op", "said"),
    [
        (1.0, "average", "op must be one of mean, sum, min, max"),
        ("text", "sum", "numbers, numpy arrays and tensors, got str"),
        (torch.tensor([1, 2]), "mean", "the mean of int64"),
        (np.array([1, 2]), "mean", "the mean of int64"),
        (torch.tensor([True]), "sum", "sum of booleans"),
        (torch.zeros(2, dtype=torch.complex64), "sum", "real numbers"),
        (np.zeros(2, dtype=np.uint64), "sum", "cannot add up uint64"),
        (np.array(["a"]), "max", "cannot add up"),
        (torch.eye(2).to_sparse(), "sum", "dense tensors"),
    ],
)
def test_what_cannot_be_added_is_refused_in_words(value: Any, op: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        on_each(lambda peers, _: peers.allreduce(value, op, None), ranks=1)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.booleans() | st.integers() | st.text() | st.none()
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=15,
)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_any_plain_value_survives_packing(value: Any) -> None:
    found = unpack(pack(value)[0], lambda tensors: None)
    assert found == value
    assert repr(found) == repr(value)


def test_an_object_with_tensors_arrives_from_any_root() -> None:
    tensors = [
        torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
    ]

    def call(peers: Peers, number: int) -> Any:
        return peers.broadcast_object({"epoch": 3, 7: ("a", [None, *tensors])} if number == 2 else "ignored", 2)

    for found in on_each(call):
        assert found["epoch"] == 3
        assert found[7][:1] == ("a",)
        assert found[7][1][0] is None
        for theirs, ours in zip(found[7][1][1:], tensors, strict=True):
            assert theirs.dtype == ours.dtype
            assert torch.equal(theirs, ours)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {2, 3}]}, r"the object\['a'\]\[1\] is of type set: .* nothing is pickled"),
        (nn.Linear(1, 1), "of type Linear"),
        ({(1, 2): 3}, "key of type tuple"),
        ([torch.eye(2).to_sparse()], r"\[0\] is a torch.sparse_coo tensor"),
        (np.zeros(2), "of type ndarray"),
    ],
)
def test_an_object_that_would_need_pickling_is_refused_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        on_each(lambda peers, _: peers.broadcast_object(value, 0), ranks=1)


def test_parameters_are_taken_over_in_place_also_where_memory_is_laid_out_otherwise() -> None:
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
        models.append(model.to(memory_format=torch.channels_last) if seed == 2 else model)
    places = [[p.data_ptr() for p in model.parameters()] for model in models]
    on_each(lambda peers, number: peers.broadcast_parameters(models[number], 1))
    wanted = models[1].state_dict()
    for model, place in zip(models, places, strict=True):
        assert [p.data_ptr() for p in model.parameters()] == place
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_ranks_that_call_different_things_are_named() -> None:
    def call(peers: Peers, number: int) -> None:
        peers.allreduce(torch.zeros(4 if number == 1 else 3), "sum", "loss")

    with pytest.raises(
        ConfigError, match=r"rank 2 has 'allreduce sum of a tensor \(4,\) float32 named loss' where rank 1"
    ):
        on_each(call)
    with pytest.raises(ConfigError, match="rank 3 has 'barrier' where rank 1 has 'broadcast_object from 0'"):
        on_each(lambda peers, number: peers.barrier() if number == 2 else peers.broadcast_object(1, 0))


def test_parameters_that_differ_and_a_root_that_is_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 2 has 'tensor weight \(3, 2\) float32'"):
        on_each(lambda peers, number: peers.broadcast_parameters(nn.Linear(2, 2 + number), 0), ranks=2)
    with pytest.raises(ConfigError, match="root=3: the ranks that compute are numbered 0 to 2"):
        on_each(lambda peers, _: peers.broadcast_object(1, 3))
    with pytest.raises(ConfigError, match="'step' is no tensor"):
        on_each(lambda peers, _: peers.broadcast_parameters({"step": 1}, 0), ranks=1)


def test_a_rank_that_does_not_call_is_noticed_by_the_deadline() -> None:
    with pytest.raises(StallError, match=r"did not join within 0\.2 s"):
        on_each(lambda peers, number: None if number == 2 else peers.barrier(), timeout=0.2)
