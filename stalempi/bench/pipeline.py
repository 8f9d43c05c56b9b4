"""Is stalempi-bench pipeline: model-parallel training, one block of the model on each rank."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from stalempi.bench.blocks import run_block
from stalempi.bench.choice import choice_from, choice_options
from stalempi.bench.keeping import checkpoint_from, checkpoint_options
from stalempi.bench.launch import is_launched, launch_from, launch_options, relaunch
from stalempi.bench.options import FiniteRange
from stalempi.bench.output import check_output, output_options
from stalempi.bench.pace import BlockPace, parse_emulated, parse_slow_blocks
from stalempi.bench.pipeline_options import PipelineOptions
from stalempi.bench.recipe import recipe_from, recipe_options
from stalempi.entry import parse_device
from stalempi.errors import ConfigError
from stalempi.pipeline.dryrun import draw, play
from stalempi.pipeline.queues import shortest_queues
from stalempi.pipeline.schedules import METHODS, Schedule, make_schedule

__all__ = ["pipeline"]

F = TypeVar("F", bound=Callable[..., Any])

_positive = FiniteRange(min=0, min_open=True)
_count = click.IntRange(min=1)
_UNIT = re.compile(r"[0-9]{1,9}")


def _method_options(function: F) -> F:
    """Adds --method and what methods take."""
    for option in (
        click.option("--in-line", is_flag=True, help="fr, dsp: recompute by itself, not beside newer data's forward."),
        click.option("--micro-batches", type=_count, help="gpipe, 1f1b, 2bw: parts of a batch [default: 4]."),
        click.option("--m", metavar="M,...", help="dsp: inputs waiting in each block, which is its staleness."),
        click.option("--p", metavar="P,...", help="dsp: outputs on their way from each block, 0 from the last."),
        click.option("--method", type=click.Choice(list(METHODS)), default="bp", show_default=True),
    ):
        function = option(function)
    return function


def _pace_options(function: F) -> F:
    """Adds what makes blocks slower."""
    for option in (
        click.option("--straggler-factor", type=FiniteRange(min=1), default=2.0, show_default=True),
        click.option(
            "--straggler-prob",
            type=FiniteRange(min=0, max=1),
            default=0.0,
            help="Probability that one random block is slower by the factor below, drawn for each batch.",
        ),
        click.option(
            "--emulate-ms", metavar="F,R,B", help="Forward, recompute, backward take so long instead (sleep)."
        ),
        click.option("--slow", multiple=True, metavar="BLOCK=FACTOR", help="Make a block slower. Repeatable."),
    ):
        function = option(function)
    return function


@click.command()
@click.option("-n", "--ranks", type=int, help="Ranks to start: blocks times replicas. Not under a launcher.")
@_method_options
@click.option("--replicas", type=_count, default=1, show_default=True, help="Copies of the whole pipeline.")
@click.option("--split", metavar="CUT,...", help="Where blocks begin: units, or modules by name [default: by time].")
@click.option("--meta", is_flag=True, help="Build the model nowhere whole: each rank fills in its own block.")
@choice_options(model="resnet11")
@click.option("--epochs", type=_count, default=20, show_default=True, help="Passes over the data.")
@click.option("--samples", type=_count, help="Global samples to train on, instead of --epochs.")
@click.option("--batch-size", type=_count, default=32, show_default=True, help="Samples per batch of each replica.")
@recipe_options
@click.option(
    "--running-stats",
    type=click.Choice(["recompute", "forward"]),
    default="recompute",
    show_default=True,
    help="Pass that updates the running statistics of normalisation layers.",
)
@click.option("--loss-scale", type=_positive, default=1024.0, show_default=True, help="With --amp fp16.")
@click.option("--device", help="cpu, cuda or cuda:N [default: a GPU where there is one].")
@_pace_options
@click.option("--evaluate-every", type=_count, help="Empty the pipe and test the model every so many samples.")
@click.option("--stall-timeout", type=_positive, help="Seconds after which a silent rank ends the job [default: 600].")
@checkpoint_options
@output_options(trace="Write every action to this file, .RANK appended.")
@click.option("--plan", is_flag=True, help="Show what each block does when, and what it costs; start nothing.")
@launch_options
def pipeline(**words: Any) -> None:
    """Train a model that is cut into blocks, one on each rank.

    Without a launcher, -n starts the ranks; under mpirun or srun this is one of them.
    """
    launched, launch = is_launched(os.environ), launch_from(words)
    ranks, plan = words.pop("ranks"), words.pop("plan")
    if not launched and ranks is None:
        raise ConfigError("say how many ranks to start, as in -n 3: one for each block")
    if ranks is not None and ranks < 1:
        raise ConfigError(f"-n {ranks}: a pipeline needs at least 1 rank")
    options = _options_from(words)
    if ranks is not None:
        options.check(ranks)
    if plan:
        _show_plan(options, ranks)
    elif launched:
        run_block(options, ranks)
    else:
        check_output(options)
        relaunch(ranks, sys.argv[1:], launch)


def _options_from(words: dict[str, Any]) -> PipelineOptions:
    recipe = recipe_from(words)
    for flag, used in (("--scale-lr", recipe.scale_lr), ("--nonfinite skip", recipe.nonfinite == "skip")):
        if used:
            raise ConfigError(f"{flag} is for data-parallel training: leave it out")
    method = _method_from(words, recipe.accumulate)
    choice = choice_from(words)
    pace = _pace_from(words, choice.seed)
    checkpoint = checkpoint_from(words)
    if words["device"] is not None:
        parse_device(words["device"])
    split = _parse_split(words.pop("split"))
    return PipelineOptions(
        method=method, choice=choice, recipe=recipe, pace=pace, checkpoint=checkpoint, split=split, **words
    )


def _method_from(words: dict[str, Any], accumulate: int) -> Callable[[int], Schedule]:
    """Returns what makes the schedule for a number of blocks; ConfigError for options that the method does not take."""
    name, p, m = words.pop("method"), _integers("--p", words.pop("p")), _integers("--m", words.pop("m"))
    micro_batches, overlaps = words.pop("micro_batches"), not words.pop("in_line")

    def method(blocks: int) -> Schedule:
        short_p, short_m = shortest_queues(blocks) if name == "dsp" and p is None and m is None else (p, m)
        found = make_schedule(
            name, p=short_p, m=short_m, micro_batches=micro_batches, accumulate=accumulate, overlaps=overlaps
        )
        found.check(blocks)
        return found

    method(len(m)) if m else method(micro_batches or 4)
    return method


def _show_plan(options: PipelineOptions, ranks: int | None) -> None:
    if ranks is None:
        raise ConfigError("--plan needs the number of ranks, as in -n 3")
    blocks = ranks // options.replicas
    pace, method = options.pace(blocks), options.method(blocks)
    unit = pace.costs()[0].forward or 1.0
    batches = 4 + 2 * max(method.delay(k, blocks) for k in range(blocks))
    run = play(method, blocks, batches, costs=pace.costs(), slow=pace.of)
    long = play(method, blocks, batches + 200, costs=pace.costs(), slow=pace.of)
    click.echo(f"{method} on {blocks} block(s), a column is {unit:g} {'s' if pace.times else 'forward times'}")
    click.echo(draw(run, unit=unit, width=min(40, int(run.seconds / unit) + 1)))
    click.echo(f"period {long.period:g} a batch, {100 * long.bubble:.0f}% of the blocks' time idle")
    for k in range(blocks):
        staleness = method.staleness(k, blocks)
        kept = f"{long.inputs[k]} inputs, {long.graphs[k]} graphs, {long.versions[k]} versions of the weights at most"
        click.echo(f"block {k}: staleness {staleness}; {kept}")


def _pace_from(words: dict[str, Any], seed: int) -> Callable[[int], BlockPace]:
    slow, times = words["slow"], parse_emulated(words.pop("emulate_ms"))
    prob, factor = words.pop("straggler_prob"), words.pop("straggler_factor")

    def pace(blocks: int) -> BlockPace:
        return BlockPace(times, parse_slow_blocks(slow, blocks), prob, factor, seed)

    return pace


def _integers(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} takes whole numbers, one a block, as in 1,1,0; got {text!r}") from None


def _parse_split(text: str | None) -> tuple[int, ...] | tuple[str, ...] | None:
    if text is None:
        return None
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if all(_UNIT.fullmatch(word) for word in words):
        return tuple(int(word) for word in words)
    for word in words:
        if not all(part.isidentifier() or _UNIT.fullmatch(part) for part in word.split(".")):
            raise ConfigError(
                f"--split takes numbers of units, as in 5,9, or names of modules, as in layer2, got {word!r}"
            )
    return words
