"""What is compressed, and what is sparse, trains over MPI too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import mpirun

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("programs") / "sparse.py"
TCP = ("--mca", "btl", "self,tcp")


@pytest.mark.parametrize("flags", [(), TCP], ids=["shared memory", "tcp"])
def test_sparse_rows_of_two_workers_are_those_of_one_process(flags: tuple[str, ...]) -> None:
    done = mpirun(PROGRAM, 3, flags=flags)
    assert done.code == 0, done.err
    difference, nbytes = done.out.split()
    assert float(difference) < 1e-5
    assert int(nbytes) < 120 * (8 + 4 * 64) + 2000  # at most 120 words in a batch, of 5000


@pytest.mark.parametrize("form", ["bf16", "topk:0.1"])
def test_compressed_pushes_train(form: str, tmp_path: Path) -> None:
    words = f"train --policy ssp --bound 2 --compress {form} --bucket-mb 0.01 --dataset digits --epochs 6"
    done = mpirun(["-m", "stalempi.bench", *words.split(), "--out", str(tmp_path)], 3, flags=TCP, timeout=120)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["accuracy"] > 0.8
    worker = result["workers"][0]
    assert worker["bytes_pushed"] / worker["iterations"] < 0.55 * result["share_bytes"][0]
