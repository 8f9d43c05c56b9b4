"""stalempi-bench synthetic says what Horovod's synthetic benchmark says, so that outputs compare line by line."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from stalempi.bench import synthetic
from stalempi.bench.synthetic import summary
from stalempi.errors import ConfigError

NUMBER = r"\d+\.\d"
LINES = rf"""
Model: cnn
Batch size: 4
Number of CPUs: 2
Policy: allreduce\(\)
Running warmup\.\.\.
Running benchmark\.\.\.
Iter #0: {NUMBER} img/sec per CPU
Iter #1: {NUMBER} img/sec per CPU
Img/sec per CPU: {NUMBER} \+-{NUMBER}
Total img/sec on 2 CPU\(s\): {NUMBER} \+-{NUMBER}
"""


@pytest.mark.mpi
def test_its_lines_are_those_that_people_know() -> None:
    words = "--model cnn --batch-size 4 --image-size 16 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2"
    command = [sys.executable, "-m", "stalempi.bench", "synthetic", "-n", "2", "--no-cuda", "--policy", "allreduce"]
    done = subprocess.run([*command, *words.split()], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(LINES.lstrip(), done.stdout), done.stdout


def test_the_total_is_that_of_all_workers() -> None:
    assert summary([[100.0, 110.0], [50.0, 60.0]], "GPU") == [
        "Img/sec per GPU: 80.0 +-9.8",
        "Total img/sec on 2 GPU(s): 160.0 +-19.6",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "say how many ranks to start"),
        ("-n 1", "at least 2 ranks"),
        ("-n 2 --model resnet51", "did you mean resnet"),
        ("-n 2 --servers 2", "at least 3 ranks, 2 servers and one worker"),
        ("-n 3 --servers 2 --policy allreduce", "there is none"),
        ("-n 2 --policy asp --bound 3", "policy asp has no option bound"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_starts(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "is_launched", lambda environment: False)
    monkeypatch.setattr(synthetic, "relaunch", lambda *_: pytest.fail("launched"))
    with pytest.raises(ConfigError, match=said):
        synthetic.synthetic(words.split(), standalone_mode=False)
