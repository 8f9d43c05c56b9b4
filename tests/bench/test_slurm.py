"""stalempi-bench slurm fills in templates that Slurm and bash read as the user meant them, and refuses the rest."""

from __future__ import annotations

import subprocess

import pytest
from click.testing import CliRunner

from stalempi.bench.slurm import slurm
from stalempi.errors import ConfigError


def printed(*words: str) -> str:
    done = CliRunner().invoke(slurm, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def options(text: str) -> list[str]:
    return [word for line in text.splitlines() if line.startswith("#SBATCH") for word in line.split()[1:]]


def program(text: str) -> list[str]:
    """Returns the command as bash reads it."""
    begin = text.index("PROGRAM=")
    script = text[begin : text.index("\n\n", begin)] + '\nprintf "%s\\0" "${PROGRAM[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.split("\0")[:-1]


def test_sizes_go_where_slurm_reads_them_and_the_server_is_one_task_more() -> None:
    text = printed("--nodes", "3", "--gpus-per-node", "2", "--cpus-per-task", "8", "--time", "1-00:00:00")
    assert {"--nodes=3", "--gpus-per-node=2", "--ntasks=7", "--ntasks-per-node=3", "--cpus-per-task=8"} <= set(
        options(text)
    )
    assert "--time=1-00:00:00" in options(text)
    assert not any(option.startswith("--partition") for option in options(text))
    assert "--partition=fat" in options(printed("--gpus-per-node", "2", "--partition", "fat"))


def test_blocks_of_a_pipeline_have_no_server() -> None:
    assert {"--ntasks=6", "--ntasks-per-node=3"} <= set(
        options(printed("--kind", "hybrid", "--nodes", "2", "--ranks-per-node", "3"))
    )


def test_nodes_without_gpus_ask_for_none() -> None:
    text = printed("--ranks-per-node", "4")
    assert "gpu" not in text.partition("PROGRAM")[0].replace("for each GPU", "")
    assert "LAUNCH=(mpirun --bind-to none) # or (srun --mpi=pmix)" in text


def test_srun_takes_the_place_of_mpirun() -> None:
    text = printed("--gpus-per-node", "4", "--launcher", "srun")
    assert "\nLAUNCH=(srun --mpi=pmix --gpu-bind=none) # or (mpirun --bind-to none)\n" in text


def test_options_of_train_arrive_as_they_were_typed() -> None:
    words = ["--policy", "ssp", "--bound", "3", "--data-dir", "/x y/$HOME's", "--model", "cnn", "--lr-decay", ""]
    words += [word for rank in range(1, 12) for word in ("--slow", f"{rank}=1.5")]
    text = printed("--gpus-per-node", "4", "--", *words)
    assert program(text) == ["stalempi-bench", "train", *words]
    assert max(map(len, text.splitlines())) <= 120


def test_without_options_the_example_of_the_template_stays() -> None:
    assert program(printed("--gpus-per-node", "4"))[:4] == ["stalempi-bench", "train", "--policy", "dssp"]


def test_a_heterogeneous_job_has_a_part_for_the_server_and_one_for_each_partition() -> None:
    parts = ["--server-partition", "cpu", "--partition", "new", "--partition", "old", "--partition", "older"]
    text = printed("--kind", "hetjob", "--nodes", "2", "--gpus-per-node", "4", *parts)
    found = " ".join(options(text)).split(" hetjob ")
    assert [[word for word in part.split() if word.startswith("--part")] for part in found] == [
        [f"--partition={name}"] for name in ("cpu", "new", "old", "older")
    ]
    assert "--ntasks=1 " in found[0]
    assert "gpus" not in found[0]
    assert all("--nodes=2 --gpus-per-node=4" in part and "--ntasks=8" in part for part in found[1:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "say how many --ranks-per-node"),
        ("--gpus-per-node 1 --time tomorrow", "'tomorrow' is no time limit"),
        ("--gpus-per-node 1 --partition a;b", "'a;b' is no name of a partition"),
        ("--gpus-per-node 1 --partition a --partition b", "are for hetjob"),
        ("--gpus-per-node 1 --server-partition a", "are for hetjob"),
        ("--gpus-per-node 1 --kind dsp", "needs at least 2 ranks"),
        ("--gpus-per-node 1 -- --out x", "gives --out itself"),
        ("--gpus-per-node 1 -- -n 4", "gives --ranks itself"),
        ("--gpus-per-node 1 --kind sweep -- --policy bsp", "gives --policy itself"),
        ("--kind summary -- --policy bsp", "takes no options of train"),
    ],
)
def test_what_makes_no_job_is_refused_in_one_line(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        printed(*words.split())


@pytest.mark.parametrize("words", ["--polici bsp", "--policy bsb", "--epochs 0", "stray"])
def test_options_that_train_would_refuse_are_refused_here(words: str) -> None:
    done = CliRunner().invoke(slurm, ["--gpus-per-node", "1", "--", *words.split()])
    assert done.exit_code == 2
    assert "#!/usr/bin/env bash" not in done.stdout
