"""The examples run as they stand, and the ported one changes no more lines than it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import mpirun

pytestmark = pytest.mark.mpi
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["digits.py", "from_horovod.py"])
def test_an_example_trains(name: str) -> None:
    done = mpirun(EXAMPLES / name, 3, timeout=120)
    assert done.code == 0, done.err
    found = re.search(r"test accuracy (0\.\d+)", done.out)
    assert found
    assert float(found[1]) >= 0.97


def test_the_ported_script_marks_six_changes() -> None:
    text = (EXAMPLES / "from_horovod.py").read_text(encoding="utf-8")
    assert re.findall(r"# changed (\d)", text) == ["1", "2", "3", "4", "5", "6"]


def test_a_job_in_one_call() -> None:
    done = mpirun(Path(__file__).with_name("programs") / "one_call.py", 3)
    assert done.code == 0, done.err
    assert done.out.split() == ["samples", "40"]
