"""What stalempi-bench pipeline refuses before it starts anything, and what --plan shows."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from stalempi.bench.pace import BlockPace, parse_emulated, parse_slow_blocks
from stalempi.bench.pipeline import pipeline
from stalempi.errors import ConfigError
from stalempi.pipeline.actions import Op


def run(*words: str) -> str:
    """Returns what the command says, as a user sees it."""
    done = CliRunner().invoke(pipeline, words, env={"COLUMNS": "200"})
    if isinstance(done.exception, ConfigError):
        return str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "say how many ranks"),
        ("-n 0", "at least 1 rank"),
        ("-n 3 --method magic", "Invalid value for '--method'"),
        ("-n 3 --method dsp --p 1,0 --m 4,2", "is for 2 block(s), but there are 3"),
        ("-n 3 --method dsp --p 1,1,0 --m 2,2,0", "the nearest that runs is p=1,1,0 m=3,2,0"),
        ("-n 3 --method dsp --p 1,x,0 --m 4,2,0", "--p takes whole numbers"),
        ("-n 3 --method dsp --m 4,2,0", "dsp needs its queue lengths"),
        ("-n 3 --method bp --m 4,2,0", "method bp has no queue lengths"),
        ("-n 3 --method fr --micro-batches 4", "method fr has no micro-batches"),
        ("-n 3 --method gpipe --accumulate 2", "does not accumulate"),
        ("-n 3 --method gpipe --batch-size 3", "--batch-size 3 cannot be cut into 4 micro-batches"),
        ("-n 3 --method bp --in-line", "in line is for fr and dsp"),
        ("-n 6 --method 2bw --micro-batches 4", "at least as many micro-batches as blocks"),
        ("-n 3 --replicas 2", "do not divide into 2 replicas"),
        ("-n 3 --split 1", "one less than blocks"),
        ("-n 3 --split 2,²", "--split takes numbers of units, as in 5,9, or names of modules, as in layer2, got '²'"),
        ("-n 2 --split ٣", "got '٣'"),
        ("-n 2 --split -1", "got '-1'"),
        (f"-n 2 --split {'9' * 5000}", "names of modules"),
        ("-n 3 --slow 3=2", "blocks are 0 to 2"),
        ("-n 3 --slow 1=x", "--slow takes BLOCK=FACTOR"),
        ("-n 3 --emulate-ms 20,20", "--emulate-ms takes F,R,B"),
        ("-n 3 --emulate-ms 20,20,-1", "finite times of at least 0"),
        ("-n 3 --straggler-prob 2", "Invalid value for '--straggler-prob'"),
        ("-n 3 --scale-lr", "--scale-lr is for data-parallel training"),
        ("-n 3 --nonfinite skip", "--nonfinite skip is for data-parallel training"),
        ("-n 3 --resume no", "need --checkpoint-dir"),
        ("-n 3 --model resnet12", "unknown model 'resnet12'"),
        ("-n 3 --dataset cifar10", "needs --data-dir"),
        ("-n 3 --device tpu", "device must be cpu"),
        ("-n 3 --trace /nowhere/x", "there is no folder /nowhere"),
        ("--plan", "say how many ranks"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, said: str) -> None:
    assert said in run(*words.split())


def test_a_plan_shows_the_schedule_and_what_it_costs() -> None:
    text = run("-n", "3", "--method", "dsp", "--plan")
    assert text.splitlines()[0] == "dsp(1,1,0;4,2,0) on 3 block(s), a column is 1 forward times"
    assert "period 3 a batch" in text
    assert "block 0: staleness 4; 5 inputs, 1 graphs, 1 versions of the weights at most" in text
    assert "period 12 a batch" in run("-n", "4", "--plan")
    slow = run("-n", "3", "--method", "dsp", "--plan", "--emulate-ms", "20,20,40", "--slow", "1=2")
    assert "period 0.12 a batch" in slow


def test_emulated_times_and_slow_blocks_are_read() -> None:
    assert parse_emulated("20,20,40") == (0.02, 0.02, 0.04)
    assert parse_slow_blocks(["1=2"], 3) == (1.0, 2.0, 1.0)


def test_one_random_block_is_slow_in_each_step_the_same_on_every_rank() -> None:
    pace = BlockPace((1.0, 1.0, 2.0), (1.0, 1.0, 1.0), prob=1.0, factor=2.0)
    for step in range(20):
        assert sorted(pace.of(block, step) for block in range(3)) == [1.0, 1.0, 2.0]
    hits = [sum(pace.of(block, step) > 1 for step in range(300)) for block in range(3)]
    assert min(hits) > 60
    assert not BlockPace(None, (1.0, 1.0))
    assert BlockPace(None, (1.0, 1.5))


def test_what_is_slower_is_said_as_options() -> None:
    pace = BlockPace((0.02, 0.02, 0.04), (1.0, 1.5), prob=0.5, factor=2.0)
    words = ["--emulate-ms 20,20,40", "--slow 1=1.5", "--straggler-prob 0.5 --straggler-factor 2"]
    assert pace.words() == words
    assert pace._own(Op.FORWARD, 0.001, 4) == pytest.approx(0.005)
    assert pace._own(Op.UPDATE, 0.001, 4) == 0.0
