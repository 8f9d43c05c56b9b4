"""Headers survive the wire, and bytes that are no header are refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.errors import ProtocolError
from stalempi.transport.message import HEADER_BYTES, Flag, Header, Kind, Tag

small, large = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    sender=small,
    layout=small,
    step=large,
    version=large,
    samples=large,
    nbytes=large,
    loss=st.floats(allow_nan=False),
    waited=st.floats(allow_nan=False),
    flags=st.sampled_from([Flag.NONE, Flag.STOP, Flag.NONFINITE, Flag.STOP | Flag.NONFINITE]),
)


@given(headers)
def test_a_header_comes_back_as_it_went(header: Header) -> None:
    buffer = bytearray(HEADER_BYTES)
    header.pack_into(buffer)
    assert dataclasses.astuple(Header.unpack(buffer)) == dataclasses.astuple(header)


def test_a_header_is_a_multiple_of_eight_bytes_so_that_numbers_may_follow() -> None:
    assert HEADER_BYTES % 8 == 0


def test_other_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="a peer runs another program"):
        Header.unpack(bytearray(HEADER_BYTES))


def test_an_unknown_kind_is_refused() -> None:
    buffer = bytearray(HEADER_BYTES)
    Header(Kind.PUSH, sender=4, layout=0, step=0).pack_into(buffer)
    buffer[4] = 99
    with pytest.raises(ProtocolError, match="rank 4 sent a message of unknown kind 99"):
        Header.unpack(buffer)


def test_tags_are_unique_and_below_what_mpi_guarantees() -> None:
    assert len({int(tag) for tag in Tag}) == len(Tag)
    assert max(Tag) <= 32767
