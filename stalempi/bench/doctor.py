"""Is stalempi-bench doctor: says what is wrong with this machine, its MPI and a launch, and what to do."""

from __future__ import annotations

import json
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from stalempi.bench.diagnose.finding import Finding, Level, as_json, fail, show, worst
from stalempi.bench.diagnose.gpus import judge_gpus
from stalempi.bench.diagnose.library import ask_library, judge_launcher, judge_library, judge_shared_settings
from stalempi.bench.diagnose.machine import judge_machine
from stalempi.bench.diagnose.probe import Answer, ask
from stalempi.bench.diagnose.ranks import MARK, look
from stalempi.bench.diagnose.slurm import judge_slurm
from stalempi.bench.diagnose.together import judge_ranks
from stalempi.bench.launch import Launch, is_launched, launch_command, launch_from, launch_options
from stalempi.bench.launchers import find_launcher
from stalempi.errors import ConfigError

__all__ = ["doctor"]

_SAME = "the launcher and mpi4py must be of the same MPI: doctor without a launcher says which there are"


@click.command()
@click.option("-n", "--ranks", type=int, help="Start so many ranks too, and look at them and the ways between them.")
@launch_options
@click.option("--out", type=click.Path(path_type=Path), default=Path(), help="Where results will be written.")
@click.option("--json", "as_text", is_flag=True, help="Print JSON instead of lines.")
def doctor(ranks: int | None, out: Path, as_text: bool, **words: Any) -> None:
    """Look for what will go wrong: in this machine, its MPI, the launcher and, with -n, a real job.

    Every line says ok, warn or FAIL, and what to do. Under mpirun or srun it looks at that job. The exit code is 0, 1
    or 2, by the worst line.
    """
    launched = is_launched(os.environ)
    launch = launch_from(words)
    if ranks is not None and ranks < 2:
        raise ConfigError(f"-n {ranks}: a job needs at least 2 ranks, one server and one worker")
    if launch != Launch(launcher=launch.launcher) and ranks is None:
        raise ConfigError("say how many ranks to start, as in -n 3, or leave the options of starting them out")
    if launch.dry_run and ranks is not None:
        click.echo(shlex.join(_command(find_launcher(launch.launcher), ranks, launch)))
        return
    findings = _look_around(launched, ranks, launch, out)
    if findings is None:
        return  # another rank speaks
    if as_text:
        click.echo(json.dumps(as_json(findings)))
    else:
        show(findings)
    sys.stdout.flush()
    sys.exit(int(worst(findings)))


def _look_around(launched: bool, ranks: int | None, launch: Launch, out: Path) -> list[Finding] | None:
    """Returns all findings; None on a rank that leaves the word to rank 0."""
    if launched:
        return _look_inside(ranks, out)
    findings, answer = _alone(out, None if launch.is_remote else ranks)
    launcher = judge_launcher(answer, launch.launcher)
    if ranks is None or worst(launcher) is Level.FAIL:
        return findings + launcher
    return findings + launcher + _start(ranks, launch)


def _look_inside(ranks: int | None, out: Path) -> list[Finding] | None:
    """Looks at the job that this rank belongs to."""
    try:
        reports = look()
    except ConfigError as error:
        first = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")) == "0"
        return [*_alone(out, None)[0], fail("world", str(error), _SAME)] if first else None
    return _alone(out, None)[0] + judge_ranks([reports], ranks) if reports else None


def _alone(out: Path, ranks: int | None) -> tuple[list[Finding], Answer]:
    """Looks at this machine and its MPI; what is slow, at once. Returns what the MPI said, too."""
    environment = dict(os.environ)
    gpus, usable = judge_gpus(environment)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_library, gpu=usable)
        findings = [*judge_machine(out=out, ranks=ranks), gpus, *judge_slurm(environment)]
        answer = asked.result()
    return findings + judge_library(answer, gpu=usable) + judge_shared_settings(environment), answer


def _start(ranks: int, launch: Launch) -> list[Finding]:
    """Starts a job of ours and judges what its ranks found."""
    limit = 60.0 + 2 * ranks
    answer = ask(_command(find_launcher(launch.launcher), ranks, launch), timeout=limit)
    jobs = [json.loads(line.partition(MARK)[2]) for line in answer.out.splitlines() if MARK in line]
    if jobs:
        return judge_ranks(jobs, ranks)
    how = f"nothing came back within {limit:.0f} s" if answer.code is None else answer.last_words
    cure = "see the command line with --dry-run and run it; several hosts must reach each other's ports"
    return [fail("start of ranks", f"{ranks} ranks did not come up: {how}", cure)]


def _command(launcher: Path, ranks: int, launch: Launch) -> list[str]:
    return launch_command(launcher, ranks, [sys.executable, "-m", "stalempi.bench.diagnose.ranks"], launch)
