"""Bad input ends stalempi-bench train with exit code 2 and one line that says what to do, before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stalempi.bench.main import main

LAUNCHER = (
    '#!/bin/sh\necho "$*" >> "$(dirname "$0")/called"\n[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0"\nexit 0\n'
)


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file in which the launcher of this test notes each call of it."""
    launcher = tmp_path / "mpirun"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "MPI_", "STALEMPI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STALEMPI_MPIEXEC", str(launcher))
    monkeypatch.delitem(sys.modules, "stalempi.abort", raising=False)  # as in a process that is no rank
    return tmp_path / "called"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "how many ranks to start, as in -n 3"),
        ("-n 1", "-n 1: a job needs at least 2 ranks"),
        ("-n -3", "-n -3: a job needs at least 2 ranks"),
        ("-n 6 --group 2", "5 computing ranks do not divide into groups of 2: start 5 or 7 ranks"),
        ("-n 3 --group 0", "0 is not in the range"),
        ("-n 2 --evaluator", "at least 3 ranks, one server and one worker, and one evaluator"),
        ("-n 3 --evaluator --slow 2=2", "workers are ranks 1 to 1"),
        ("-n 3 --evaluate-every 5m", "give global samples as in 5000, or seconds as in 30s"),
        ("-n 3 --servers 0", "0 is not in the range"),
        ("-n 2 --servers 2", "at least 3 ranks, 2 servers and one worker"),
        ("-n 3 --servers 2 --evaluator", "at least 4 ranks, 2 servers and one worker, and one evaluator"),
        ("-n 6 --servers 2 --group 2", "groups go with one server only"),
        ("-n 4 --servers 2 --slow 1=2", "workers are ranks 2 to 3"),
        ("-n 4 --servers 2 --clip-norm 1", "no server sees a whole norm"),
        ("-n 4 --servers 2 --policy ssp-cached --bound 2", "take plain ssp"),
        ("-n 4 --servers 2 --policy allreduce", "under allreduce"),
        ("-n three", "'three' is not a valid integer"),
        ("-n 3 --policy fast", "'fast' is not one of"),
        ("-n 3 --lower 5 --upper 4", "lower"),
        ("-n 3 --policy ssp --bound -1", "bound"),
        ("-n 3 --policy ssp", "policy ssp needs bound"),
        ("-n 3 --policy asp --bound 2", "policy asp has no option bound"),
        ("-n 3 --policy bsp --backup -1", "backup"),
        ("-n 3 --policy bsp --backup 2", "backup=2 needs at least 3 workers, got 2"),
        ("-n 5 --group 2 --policy bsp --backup 2", "backup=2 needs at least 3 workers, got 2"),
        ("-n 5 --group 2 --policy asp --run-ahead", "a group's leader waits for its members"),
        ("-n 5 --group 2 --policy asp --early-forward", "a group's leader hands on whole releases"),
        ("-n 3 --policy asp --run-ahead --early-forward", "leave one of them out"),
        ("-n 3 --policy allreduce --early-forward", "nothing is released"),
        ("-n 3 --policy ssp --bound 0 --run-ahead", "ssp or dssp with s >= 1"),
        ("-n 5 --group 2 --policy ssp-cached --bound 2", "a group has several"),
        ("-n 3 --controller psychic", "'psychic' is not one of"),
        ("-n 3 --out /proc/nowhere", "--out /proc/nowhere cannot be written"),
        ("-n 3 --data-dir /no/such/folder", "--data-dir /no/such/folder is not a folder"),
        ("-n 3 --dataset cifar10", "--dataset cifar10 needs --data-dir"),
        ("-n 3 --dataset mnist2", "'mnist2' is not one of"),
        ("-n 3 --dataset text --model transformer-tiny", "--dataset text needs --data-dir"),
        ("-n 3 --dataset digits --data-dir .", "dataset 'digits' has no use for data_dir"),
        ("-n 3 --sequence-length 8", "dataset 'digits' has no use for sequence_length"),
        ("-n 3 --sequence-length 0", "0 is not in the range"),
        ("-n 3 --dataset text-synthetic", "model 'cnn' is not for text: choose one of transformer-tiny"),
        ("-n 3 --model transformer-small", "model 'transformer-small' is not for images"),
        ("-n 3 --model resnet51", "did you mean resnet"),
        ("-n 3 --slow 2", "--slow takes RANK=FACTOR"),
        ("-n 3 --slow 3=2", "workers are ranks 1 to 2"),
        ("-n 3 --slow 1=0.5", "a factor of at least 1"),
        ("-n 3 --policy allreduce --trace x", "--trace records what a server decides"),
        ("-n 3 --policy allreduce --correction gap-aware", "under allreduce none is stale"),
        ("-n 3 --policy allreduce --evaluator", "are of a job with a server"),
        ("-n 3 --policy allreduce --amp fp16", "allreduce has sent by then: take bf16"),
        ("-n 3 --policy allreduce --checkpoint-dir /tmp", "the server saves a run, and allreduce has none"),
        ("-n 3 --policy allreduce --slow 3=2", "workers are ranks 0 to 2"),
        ("-n 3 --policy allreduce --bound 2", "policy allreduce has no option bound; it takes overlap"),
        ("-n 3 --lr-decay half", "expected shares such as 0.5,0.75"),
        ("-n 3 --lr-decay 0.5,1.5", "1.5"),
        ("-n 3 --schedule cosine --lr-decay 0.5", "--lr-decay is of --schedule step, not of cosine"),
        ("-n 3 --schedule linear", "'linear' is not one of"),
        ("-n 3 --warmup 1", "1.0 is not in the range"),
        ("-n 3 --accumulate 0", "0 is not in the range"),
        ("-n 3 --clip-norm 0", "0.0 is not in the range"),
        ("-n 3 --clip-value -1", "-1.0 is not in the range"),
        ("-n 3 --nonfinite count", "'count' is not one of"),
        ("-n 3 --amp half", "'half' is not one of"),
        ("-n 3 --log-interval 0", "0.0 is not in the range"),
        ("-n 3 --log-level loud", "'loud' is not one of"),
        ("-n 3 --metrics /no/such/folder/metrics", "--metrics /no/such/folder/metrics: there is no folder"),
        ("-n 3 --tensorboard /proc/nowhere", "--tensorboard /proc/nowhere cannot be written"),
        ("-n 3 --download", "dataset 'digits' has no use for download"),
        ("-n 3 --image-size 8", "dataset 'digits' has no use for image_size"),
        ("-n 3 --dataset imagenet", "--dataset imagenet needs --data-dir"),
        ("-n 3 --lr nan", "nan is not a finite number"),
        ("-n 3 --emulate-ms inf", "inf is not a finite number"),
        ("-n 3 --device tpu", "device must be cpu, cuda or cuda:N"),
        ("-n 3 --trace /no/such/folder/trace", "there is no folder"),
        ("-n 3 --lr 0", "0.0 is not in the range"),
        ("-n 3 --lr -0.1", "-0.1 is not in the range"),
        ("-n 3 --momentum 1", "1.0 is not in the range"),
        ("-n 3 --batch-size 0", "0 is not in the range"),
        ("-n 3 --epochs 0", "0 is not in the range"),
        ("-n 3 --samples 0", "0 is not in the range"),
        ("-n 3 --correction magic", "'magic' is not one of"),
        ("-n 3 --hosts n1,:2", "--hosts takes HOST[:N],... as in n1:2,n2:2, got ':2'"),
        ("-n 3 --hosts n1:2", "--hosts has places for 2 rank(s), but -n is 3"),
        ("-n 2 --hosts n1,n2,n3", "3 node(s) more, but -n is 2"),
        ("-n 3 --hosts n1 --hostfile h", "give one of --hosts and --hostfile"),
        ("-n 3 --hostfile /no/such/file", "--hostfile /no/such/file cannot be read"),
        ("-n 3 --launcher /no/such/mpirun", "--launcher /no/such/mpirun is not a program"),
        ("-n 3 --env NO_SUCH_VARIABLE", "--env NO_SUCH_VARIABLE: there is no such variable here"),
        ("-n 3 --env 3=4", "--env takes NAME or NAME=VALUE"),
        ("-n 3 --bind-to chair", "'chair' is not one of"),
        ("-n 3 --mpi-args 'half", '--mpi-args "\'half" cannot be read'),
        ("-n 3 --no-such-option", "No such option"),
        ("-n 3 surplus", "unexpected extra argument"),
    ],
)
def test_it_is_said_in_one_line_and_nothing_is_launched(
    called: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["stalempi-bench", "train", *words.split()])
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail(f"launched {command[1]}"))
    with pytest.raises(SystemExit) as ended:
        main()
    streams = capsys.readouterr()
    assert ended.value.code == 2
    assert streams.out == ""
    assert len(streams.err.splitlines()) == 1
    assert streams.err.startswith("stalempi-bench: error: ")
    assert said in streams.err
    assert not called.exists() or set(called.read_text().split()) == {"--version"}


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stalempi.bench", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_real_command_shows_no_traceback(called: Path) -> None:
    done = bench("train", "-n", "3", "--model", "resnet51")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert not called.exists()


def test_good_input_launches_the_same_words(called: Path) -> None:
    """The other tests say something only if this launcher would have been noticed."""
    done = bench("train", "-n", "3", "--policy", "bsp", "--lr-decay", "")
    assert done.returncode == 0, done.stderr
    version, command = called.read_text().splitlines()
    assert version == "--version"
    assert command.startswith("--bind-to none")
    assert command.rstrip().endswith("-n 3 " + sys.executable + " -m stalempi.bench train -n 3 --policy bsp --lr-decay")


def test_an_unknown_subcommand_is_said_in_one_line(called: Path) -> None:
    done = bench("trane")
    assert done.returncode == 2
    assert "No such command 'trane'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not called.exists()
