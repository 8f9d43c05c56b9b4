"""Messages of more than 2 GiB, and of more elements than an int counts, arrive whole: they go in buckets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from stalempi import replica
from stalempi.replica import Replica
from tests.launch import mpirun

FREE = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.mpi
@pytest.mark.skipif(FREE < 8e9, reason=f"needs 8 GB of memory, {FREE / 1e9:.1f} GB are free")
def test_a_push_of_more_than_two_gigabytes_arrives_whole() -> None:
    done = mpirun(Path(__file__).with_name("programs") / "large.py", 2, timeout=240)
    assert done.code == 0, done.err
    assert done.out.split() == ["3", "parts"]


def test_what_is_not_trained_goes_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MAX_BUCKET_BYTES", 100)
    model = nn.Linear(64, 1)
    model.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    parts = Replica(model, optimizer, bucket_bytes=1 << 20).state()
    assert [part.nbytes for part in parts.tensors] == [64, 100, 100, 56]
    parts.tensors[1].zero_()
    assert int((model.weight == 0).sum()) == 25
