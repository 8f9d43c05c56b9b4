"""Is stalempi-bench train: data-parallel training, under mpirun from one command."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from stalempi.bench.choice import choice_from, choice_options
from stalempi.bench.emulate import parse_slow
from stalempi.bench.keeping import checkpoint_from, checkpoint_options
from stalempi.bench.launch import is_launched, launch_from, launch_options, relaunch
from stalempi.bench.options import FiniteRange, policy_from, policy_options
from stalempi.bench.output import check_output, output_options
from stalempi.bench.recipe import recipe_from, recipe_options
from stalempi.bench.training import TrainOptions, run_rank
from stalempi.bench.wire import wire_from, wire_options
from stalempi.correction import CORRECTIONS
from stalempi.errors import ConfigError
from stalempi.roles import assign_role
from stalempi.simulate.scenarios import SCENARIOS

__all__ = ["train"]

_positive = FiniteRange(min=0, min_open=True)
_count = click.IntRange(min=1)


@click.command()
@click.option("-n", "--ranks", type=int, help="Ranks to start: a server, workers, an evaluator. Not under a launcher.")
@launch_options
@policy_options
@choice_options(model="cnn")
@click.option(
    "--loader-processes", type=click.IntRange(min=0), default=0, show_default=True, help="Per worker, to decode images."
)
@click.option(
    "--epochs", type=_count, default=20, show_default=True, help="Passes over the data, all workers together."
)
@click.option("--samples", type=_count, help="Global samples to train on, instead of --epochs.")
@click.option("--batch-size", type=_count, default=32, show_default=True, help="Samples per worker and iteration.")
@recipe_options
@click.option(
    "--correction", type=click.Choice(CORRECTIONS), default="none", show_default=True, help="Mend stale gradients."
)
@click.option("--device", help="cpu, cuda or cuda:N [default: a GPU where there is one].")
@click.option("--slow", multiple=True, metavar="RANK=FACTOR", help="Make a worker slower. Repeatable.")
@click.option("--emulate-ms", type=_positive, help="A sample takes this long instead (sleep).")
@click.option(
    "--scenario", type=click.Choice(list(SCENARIOS)), help="Iterations take as long as in this scenario (sleep)."
)
@click.option("--iteration-ms", type=_positive, default=100.0, show_default=True, help="Of an undisturbed one in it.")
@click.option("--servers", type=_count, default=1, show_default=True, help="Ranks that serve, each a share.")
@click.option("--group", type=_count, default=1, show_default=True, help="Ranks that make one worker and push once.")
@click.option("--evaluator", is_flag=True, help="Let the last rank test the model while the others train it.")
@click.option(
    "--evaluate-every", metavar="N|Ns", help="Test the model every N global samples, or N seconds: 5000, 30s."
)
@wire_options
@click.option("--stall-timeout", type=_positive, help="Seconds after which a silent rank ends the job [default: 600].")
@checkpoint_options
@output_options(trace="Write every event to this file.")
def train(**words: Any) -> None:
    """Train a model with a parameter server on rank 0 and workers on the other ranks; allreduce: only workers.

    With --servers S, ranks 0 to S-1 serve, each with a share of the parameters; rank 0 alone decides.

    Without a launcher, -n starts the ranks; under mpirun or srun this is one of them.
    """
    launched = is_launched(os.environ)
    ranks, launch = words.pop("ranks"), launch_from(words)
    if not launched and ranks is None:
        raise ConfigError("say how many ranks to start, as in -n 3: one server and two workers")
    if ranks is not None and ranks < 2:
        raise ConfigError(f"-n {ranks}: a job needs at least 2 ranks, one server and one worker")
    policy = policy_from(words)
    words["checkpoint"] = checkpoint_from(words)
    options = TrainOptions(
        policy=policy, choice=choice_from(words), recipe=recipe_from(words), wire=wire_from(words), **words
    )
    if ranks is not None:
        role = assign_role(0, ranks, group=options.group, evaluator=options.evaluator, servers=options.servers)
        policy.start(role.num_workers if policy.has_server else ranks, 0.0)  # says whether it can do with so many
    if launched:
        run_rank(options, ranks)
        return
    parse_slow(options.slow, ranks - options.evaluator, first=options.servers if policy.has_server else 0)
    check_output(options)
    relaunch(ranks, sys.argv[1:], launch)
