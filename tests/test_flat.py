"""Flat storage holds tensors of any kind as views, and cuts into buckets that cover it exactly."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stalempi.errors import ConfigError
from stalempi.flat import ALIGNMENT, Flat

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


def filled(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) + start).reshape(shape).to(dtype)


tensors = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)), min_size=1, max_size=8
).map(lambda kinds: [filled(shape, dtype, place) for place, (shape, dtype) in enumerate(kinds)])


@settings(deadline=None, max_examples=60)
@given(tensors, st.integers(1, 200))
def test_adopting_keeps_values_and_buckets_cover_every_byte_once(given_tensors: list[Tensor], limit: int) -> None:
    before = [t.clone() for t in given_tensors]
    flat = Flat(given_tensors)
    flat.adopt(given_tensors)
    for tensor, old, view in zip(given_tensors, before, flat.views, strict=True):
        assert torch.equal(tensor, old)
        assert tensor.data_ptr() == view.data_ptr()
        assert view.numel() == 0 or view.data_ptr() % ALIGNMENT == flat_base(flat, view) % ALIGNMENT
    buckets = flat.buckets(limit)
    assert all(0 < bucket.numel() <= limit and bucket.dtype == torch.uint8 for bucket in buckets)
    raw = [storage.view(torch.uint8) for storage in flat.storages if storage.numel()]
    assert sum(bucket.numel() for bucket in buckets) == sum(r.numel() for r in raw) == flat.nbytes
    if buckets:
        assert torch.equal(torch.cat(buckets), torch.cat(raw))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 300))
def test_only_a_tensor_larger_than_a_bucket_is_cut_inside(sizes: list[int], limit: int) -> None:
    flat = Flat([torch.zeros(size, dtype=torch.uint8).repeat(4) for size in sizes])
    base = flat.storages[0].data_ptr()
    starts = [view.storage_offset() for view in flat.views] + [flat.nbytes]
    for cut in (bucket.data_ptr() - base for bucket in flat.buckets(limit)):
        inside = [end - start for start, end in itertools.pairwise(starts) if start < cut < end]
        assert all(size > limit for size in inside)


def test_no_bucket_is_larger_than_what_every_mpi_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalempi.flat.MAX_BUCKET_BYTES", 100)
    assert [bucket.numel() for bucket in Flat([torch.zeros(64)]).buckets(10_000)] == [100, 100, 56]


def flat_base(flat: Flat, view: Tensor) -> int:
    return next(s.data_ptr() for s in flat.storages if s.dtype == view.dtype)


def test_a_bucket_ends_where_a_tensor_ends_unless_one_tensor_is_larger() -> None:
    flat = Flat([torch.zeros(16), torch.zeros(16), torch.zeros(100), torch.zeros(16)])  # 64, 64, 448 (padded), 64 bytes
    assert [bucket.numel() for bucket in flat.buckets(128)] == [128, 128, 128, 128, 128]
    assert [bucket.numel() for bucket in flat.buckets(130)] == [128, 130, 130, 130, 122]
    assert [bucket.numel() for bucket in flat.buckets(10_000)] == [640]


def test_writing_to_a_view_is_writing_to_a_bucket() -> None:
    model = nn.Linear(3, 2)
    flat = Flat(list(model.parameters()))
    flat.adopt(list(model.parameters()))
    flat.storages[0].fill_(7.0)
    assert torch.equal(model.weight.data, torch.full((2, 3), 7.0))


def test_channels_last_strides_are_kept() -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    flat = Flat([weight])
    assert flat.views[0].stride() == weight.stride()
    old = weight.clone()
    flat.adopt([weight])
    assert torch.equal(weight, old)
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_a_strided_tensor_becomes_dense() -> None:
    source = torch.arange(12.0).reshape(3, 4)
    tensor = source[:, ::2]
    flat = Flat([tensor])
    flat.adopt([tensor])
    assert torch.equal(tensor, source[:, ::2])


def test_moving_leaves_the_old_storage_to_whoever_still_reads_it() -> None:
    parameter = nn.Parameter(torch.ones(5))
    flat = Flat([parameter])
    flat.adopt([parameter])
    old = flat.move([parameter], [torch.empty_like(s) for s in flat.storages])
    assert parameter.tolist() == [1.0] * 5
    assert parameter.data_ptr() == flat.storages[0].data_ptr() != old[0].data_ptr()
    with torch.no_grad():
        parameter.add_(1)
    assert float(old[0].sum()) == 5.0
    assert float(flat.storages[0].sum()) == 10.0


def test_like_has_the_same_layout_and_zeros() -> None:
    flat = Flat([torch.ones(3), torch.ones(2, dtype=torch.int64)])
    other = flat.like()
    assert [s.shape for s in other.storages] == [s.shape for s in flat.storages]
    assert other.nbytes == flat.nbytes
    assert all(int(s.count_nonzero()) == 0 for s in other.storages)


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="one device"):
        Flat([torch.zeros(1), torch.zeros(1, device="meta")])
