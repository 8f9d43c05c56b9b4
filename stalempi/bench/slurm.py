"""Is stalempi-bench slurm: fills in one of the sbatch templates of slurm/."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import click
from click.core import ParameterSource

from stalempi.errors import ConfigError

__all__ = ["KINDS", "Job", "fill", "slurm"]

# What a template's tasks train with, and what it says itself and the user therefore may not.
_OURS = {"ranks", "out", "checkpoint_dir", "checkpoint_every", "resume"}
KINDS: dict[str, tuple[str, set[str]]] = {
    "dssp": ("train", _OURS),
    "dsp": ("pipeline", _OURS),
    "hybrid": ("pipeline", _OURS | {"replicas"}),
    "sweep": ("train", _OURS | {"policy", "seed"}),
    "hetjob": ("train", _OURS),
    "summary": ("", set()),
}
_SERVED = {"dssp", "sweep"}  # one task more, for the server
_WIDTH = 110
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_PARTITION = re.compile(r"[\w.,-]+")


@dataclass(frozen=True)
class Job:
    """What the user asked for; see the command's help.

    Attributes:
        ranks_per_node: workers or blocks on a node; None for one a GPU.
        partition: one at most; of a hetjob, one for each part with workers. None given: the site's default.
        words: options of the command that trains; none: the template's own.
    """

    kind: str
    nodes: int
    gpus_per_node: int
    ranks_per_node: int | None
    cpus_per_task: int
    time: str | None
    partition: tuple[str, ...]
    server_partition: str | None
    launcher: str
    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.ranks_per_node and not self.gpus_per_node and self.kind != "summary":
            raise ConfigError("without --gpus-per-node say how many --ranks-per-node there are to be")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time {self.time!r} is no time limit: give it as HH:MM:SS or D-HH:MM:SS")
        for name in (*self.partition, self.server_partition):
            if name is not None and not _PARTITION.fullmatch(name):
                raise ConfigError(f"{name!r} is no name of a partition")
        if self.kind != "hetjob" and (self.server_partition or len(self.partition) > 1):
            raise ConfigError(
                f"--kind {self.kind} takes one --partition: several, and --server-partition, are for hetjob"
            )
        if self.kind == "dsp" and self.tasks == 1:
            raise ConfigError("--kind dsp needs at least 2 ranks, a block on each: raise --nodes or --ranks-per-node")
        _check_words(self.kind, self.words)

    @property
    def tasks_per_node(self) -> int:
        """Ranks on a node at most."""
        return (self.ranks_per_node or self.gpus_per_node) + (self.kind in _SERVED)

    @property
    def tasks(self) -> int:
        """Ranks of the job; of a hetjob, of each part with workers."""
        return self.nodes * (self.ranks_per_node or self.gpus_per_node) + (self.kind in _SERVED)


@click.command()
@click.option("--kind", type=click.Choice(list(KINDS)), default="dssp", show_default=True, help="Template to fill in.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="hetjob: of each partition.")
@click.option("--gpus-per-node", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--ranks-per-node", type=click.IntRange(min=1), help="Workers or blocks on a node [default: one a GPU].")
@click.option("--cpus-per-task", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--time", help="Time limit, as Slurm takes it [default: the template's].")
@click.option("--partition", multiple=True, help="Of the job [default: the site's]. hetjob: once for each part.")
@click.option("--server-partition", help="hetjob: where the server is [default: the site's].")
@click.option("--launcher", type=click.Choice(["mpirun", "srun"]), default="mpirun", show_default=True)
@click.argument("words", nargs=-1, metavar="[-- OPTIONS...]", type=click.UNPROCESSED)
def slurm(**words: Any) -> None:
    """Print an sbatch script made from a template; OPTIONS are those of train, or of pipeline for dsp and hybrid.

    Without OPTIONS the template's example stays. A server is a rank on top of --ranks-per-node.
    """
    click.echo(fill(Job(**words)), nl=False)


def fill(job: Job) -> str:
    """Returns the template that `job` needs, filled in."""
    text = (files("stalempi.bench") / "templates" / f"{job.kind}.sbatch").read_text(encoding="utf-8")
    if job.kind == "hetjob":
        text = _fill_parts(text, job)
    else:
        text = _fill_options(text, _values(job, job.partition[0] if job.partition else None))
    if job.launcher == "srun":
        text = re.sub(r"^LAUNCH=\((.*)\) # or \((.*)\)$", r"LAUNCH=(\2) # or (\1)", text, flags=re.MULTILINE)
    if not job.gpus_per_node:
        text = text.replace(" --gpu-bind=none", "")
    if job.words:
        lines = _wrapped(job.words)
        text = re.sub(r"^(PROGRAM=.*\n)(?:    .*\n)+", lambda found: found[1] + lines, text, flags=re.MULTILINE)
    return text


def _check_words(kind: str, words: Sequence[str]) -> None:
    """Raises what the command that trains would, or ConfigError for an option that the template gives."""
    command, ours = KINDS[kind]
    if not words:
        return
    if not command:
        raise ConfigError(f"--kind {kind} takes no options of train: leave out what stands behind --")
    trains = getattr(importlib.import_module(f"stalempi.bench.{command}"), command)
    assert isinstance(trains, click.Command)
    context = trains.make_context(command, list(words))
    for name in sorted(ours & context.params.keys()):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"the {kind} template gives --{name.replace('_', '-')} itself: leave it out")


def _values(job: Job, partition: str | None) -> dict[str, object]:
    """Returns what sbatch's options are to be, None for one that is to go."""
    values: dict[str, object] = {"partition": partition, "cpus-per-task": job.cpus_per_task}
    if job.time:
        values["time"] = job.time
    if job.kind != "summary":
        values |= {"nodes": job.nodes, "gpus-per-node": job.gpus_per_node or None}
        values |= {"ntasks": job.tasks, "ntasks-per-node": job.tasks_per_node}
    return values


def _fill_parts(text: str, job: Job) -> str:
    """Fills a heterogeneous job in: its first part is the server's, and the second one is the model of all others."""
    separator = "#SBATCH hetjob\n"
    server, part, rest = text.split(separator, 2)
    server = _fill_options(server, _values(job, job.server_partition) | {"nodes": 1, "ntasks": 1})
    parts = [_fill_options(part, _values(job, name)) for name in job.partition or [None]]
    return separator.join([server, *parts]) + "\n" + rest.split("\n\n", 1)[1]


def _fill_options(text: str, values: Mapping[str, object]) -> str:
    """Gives the sbatch options that there are their values."""
    for name, value in values.items():
        word = "" if value is None else f" --{name}={value}"
        text = re.sub(rf"^(#SBATCH.*?) --{name}=\S+", rf"\1{word}", text, flags=re.MULTILINE)
    return text


def _wrapped(words: Sequence[str]) -> str:
    """Returns the words as bash reads them back, in as many lines as they need, and the bracket that ends them."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1] and len(lines[-1]) + len(word) >= _WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(f"    {line}" for line in lines) + ")\n"
