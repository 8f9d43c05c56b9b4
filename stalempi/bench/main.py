"""Is the stalempi-bench command: finds the subcommand and turns our errors into one line."""

from __future__ import annotations

import importlib
import sys

import click

from stalempi.errors import ConfigError, StalempiError
from stalempi.version import __version__

__all__ = ["main"]

# Each subcommand is a click command of the same name in the module of the same name, imported when it is called.
_COMMANDS = {
    "train": "Train a model with a parameter server and workers.",
    "pipeline": "Train a model in blocks, one on each rank.",
    "simulate": "Play a policy under a virtual clock.",
    "compare": "Compare policies over scenarios and seeds.",
    "comm": "Measure push and release by size, beside plain MPI and gloo.",
    "synthetic": "Measure images per second, in the words of Horovod's benchmark.",
    "doctor": "Say what is wrong with this machine, its MPI and a launch.",
    "slurm": "Print an sbatch script, made to measure.",
    "summary": "Sum up finished runs, as of a sweep.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"stalempi.bench.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stalempi-bench")
def _group() -> None:
    """Stale-synchronous training over MPI: run it, play it, compare it."""


def main() -> None:
    """Runs the command line; exit code 2 and one line on stderr where the user's input is at fault."""
    try:
        _group(prog_name="stalempi-bench", standalone_mode=False)
    except click.ClickException as error:
        _end(error.format_message(), 2)
    except click.Abort:
        _end("interrupted", 130)
    except ConfigError as error:
        _end(str(error), 2)
    except StalempiError as error:
        _end(str(error), 1)


def _end(message: str, code: int) -> None:
    """Says `message` and ends; on a rank of a job, by ending the whole job."""
    if "stalempi.abort" in sys.modules:
        raise  # noqa: PLE0704 - called while handling; the hooks that init installed know how to end a job
    click.echo(f"stalempi-bench: error: {' '.join(message.split())}", err=True)
    sys.exit(code)
