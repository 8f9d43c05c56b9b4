"""A trace is whole lines of JSON that come back as they were; replayed, a policy decides the same (law 1)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stalempi.errors import ConfigError
from stalempi.policy import DSSP, SSP, Apply, Continue, Drop, Push, Release
from stalempi.simulate.timing import Limit, simulate
from stalempi.trace import Recorder, Start, decision_text, parse_decision, read_trace, replay, write_trace

from .runs import NETWORK, POLICIES, stalls, traced


@pytest.mark.parametrize("name", POLICIES)
def test_a_replayed_policy_decides_the_same(name: str) -> None:
    _, trace = traced(POLICIES[name](), stalls(), network=NETWORK)
    assert len(trace.records) > 200
    assert replay(trace) == []


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_written_comes_back(name: str, tmp_path: Path) -> None:
    _, trace = traced(POLICIES[name](), stalls())
    write_trace(tmp_path / "run.jsonl", trace)
    assert read_trace(tmp_path / "run.jsonl") == trace


def test_a_recorder_writes_the_same_file_while_the_run_goes(tmp_path: Path) -> None:
    policy = DSSP(1, 4)
    with Recorder(tmp_path / "a", policy, started=lambda: 0.0) as recorder:
        simulate(policy, stalls(), limit=Limit(pushes=100), observe=recorder)
    _, trace = traced(DSSP(1, 4), stalls(), limit=Limit(pushes=100))
    write_trace(tmp_path / "b", trace)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()


def test_a_line_is_there_as_soon_as_its_event_was(tmp_path: Path) -> None:
    policy = SSP(1)
    recorder = Recorder(tmp_path / "run.jsonl", policy, started=lambda: 7.0)
    policy.start(2, 7.0)
    recorder(Push(0, 8.0), policy.on_push(Push(0, 8.0)))
    assert read_trace(tmp_path / "run.jsonl").start == Start("ssp", {"bound": 1}, 2, 7.0)
    recorder.close()


def test_a_decision_that_was_otherwise_is_found() -> None:
    _, trace = traced(SSP(1), stalls())
    trace.records[10] = replace(trace.records[10], decisions=())
    (mismatch,) = replay(trace)
    assert (mismatch.place, mismatch.record.decisions) == (10, ())
    assert mismatch.decided


def test_another_policy_decides_otherwise() -> None:
    _, trace = traced(SSP(5), stalls())
    with pytest.raises(Exception, match="pushed twice"):
        replay(trace, SSP(0))


@pytest.mark.parametrize("decision", [Apply((0, 2)), Drop(1), Release(3), Continue(10)])
def test_a_decision_as_text(decision: Apply | Drop | Release | Continue) -> None:
    assert parse_decision(decision_text(decision)) == decision


def test_a_policy_comes_back_from_its_options() -> None:
    policy = DSSP(2, 9, predictor="mean-std:2", eps=0.1, narrow=(10, 20))
    policy.start(2, 0.0)
    assert str(Start.of(policy, 0.0).make_policy()) == str(policy)


@pytest.mark.parametrize(
    ("line", "text", "says"),
    [
        (1, '{"format":"other"}', "line 1"),
        (2, '{"event":"push","worker":9,"now":1,"gap":0,"decisions":[]}', "worker 9 is not one of 4"),
        (3, '{"event":"push","worker":0,"now":1,"gap":0,"decisions":["release"]}', "line 3"),
        (2, '{"event":"pull","worker":0,"now":1,"gap":0,"decisions":[]}', "line 2"),
        (4, '{"event":"push"', "line 4"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, line: int, text: str, says: str) -> None:
    path = tmp_path / "run.jsonl"
    write_trace(path, traced(SSP(1), stalls())[1])
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=says):
        read_trace(path)


def test_every_line_is_json(tmp_path: Path) -> None:
    write_trace(tmp_path / "run.jsonl", traced(SSP(1), stalls())[1])
    first, *rest = (json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines())
    assert first == {"format": "stalempi-trace-1", "policy": "ssp", "options": {"bound": 1}, "workers": 4, "now": 0.0}
    assert {line["event"] for line in rest} == {"push", "leave"}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(tmp_path / "none" / "run.jsonl", SSP(1), started=lambda: 0.0)
