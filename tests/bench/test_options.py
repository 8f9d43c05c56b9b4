"""The words of the command line become the policy that they name, with its own defaults and no one else's."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from stalempi.bench.options import parse_shares, policy_from, policy_options
from stalempi.errors import ConfigError


@click.command()
@policy_options
def show(**words: object) -> None:
    click.echo(str(policy_from(words)))
    click.echo(f"left: {sorted(words)}")


def made(*words: str) -> str:
    """Returns the policy that `words` make, in words; raises what making it raises."""
    result = CliRunner().invoke(show, words)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    policy, rest = result.output.splitlines()
    assert rest == "left: []"
    return policy


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("--policy bsp", "bsp()"),
        ("--policy bsp --backup 1", "bsp(backup=1)"),
        ("--policy asp", "asp()"),
        ("--policy ssp --bound 4", "ssp(bound=4)"),
        ("--policy ssp --bound 0", "ssp(bound=0)"),
        ("--policy ssp-cached --bound 2", "ssp-cached(bound=2)"),
    ],
)
def test_each_policy_takes_its_own_options(words: str, policy: str) -> None:
    assert made(*words.split()) == policy


def test_dssp_is_the_default_with_the_thresholds_of_the_paper() -> None:
    assert made() == made("--policy", "dssp", "--lower", "3", "--upper", "15")
    assert "lower=3, upper=15" in made()
    assert "lower=2, upper=15" in made("--lower", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--policy ssp", "policy ssp needs bound"),
        ("--policy asp --bound 3", "policy asp has no option bound; it takes none"),
        ("--policy ssp --bound 3 --upper 9", "policy ssp has no option upper; it takes bound"),
        ("--policy dssp --bound 3", "policy dssp has no option bound"),
        ("--policy bsp --backup -1", "backup must be .*-1"),
        ("--policy ssp --bound -1", "bound must be .*-1"),
        ("--lower 16", "lower.*16"),
        ("--lower 5 --upper 4", "lower.*5.*4"),
    ],
)
def test_what_does_not_fit_is_said_with_its_value(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(*words.split())


def test_shares_are_numbers_between_commas() -> None:
    assert parse_shares("0.5, 0.75") == (0.5, 0.75)
    assert parse_shares("") == ()
    with pytest.raises(ConfigError, match=r"expected shares such as 0\.5,0\.75, got 'half'"):
        parse_shares("half")


def test_narrowing_is_read_as_two_counts_of_pushes() -> None:
    words: dict[str, object] = dict.fromkeys(("bound", "lower", "upper", "controller", "predictor", "backup"))
    assert "narrow=10:20" in str(policy_from({"policy": "dssp", "narrow": "10:20", **words}))
    with pytest.raises(ConfigError, match="--narrow takes BEGIN:END"):
        policy_from({"policy": "dssp", "narrow": "10", **words})
