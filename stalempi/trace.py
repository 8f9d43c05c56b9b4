"""Keeps one event record for real and simulated runs: written as a run goes, read back, replayed through a policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from stalempi.errors import ConfigError
from stalempi.policy import Apply, Continue, Decision, Drop, Event, Leave, Policy, Push, Release, make_policy

__all__ = ["Mismatch", "Record", "Recorder", "Start", "Trace", "read_trace", "replay", "write_trace"]

_FORMAT = "stalempi-trace-1"
_EVENTS: dict[str, type[Push] | type[Leave]] = {"push": Push, "leave": Leave}
_ONE_WORKER: dict[str, type[Drop] | type[Release] | type[Continue]] = {
    "drop": Drop,
    "release": Release,
    "continue": Continue,
}


@dataclass(frozen=True)
class Start:
    """How a run began: the policy by name and options, its workers, and `now`, the server's clock (s)."""

    policy: str
    options: dict[str, int | float | str]
    num_workers: int
    now: float

    @classmethod
    def of(cls, policy: Policy, now: float) -> Start:
        """Describes a policy that was started at `now` (s)."""
        options = policy.options() | ({"run_ahead": policy.run_ahead} if policy.run_ahead else {})
        return cls(policy.name, options, len(policy.clocks.counts), now)

    def make_policy(self) -> Policy:
        """Makes the policy of the run anew; ConfigError if there is none of that name and options."""
        options: dict[str, object] = dict(self.options)
        if "narrow" in options:
            options["narrow"] = tuple(int(word) for word in str(options["narrow"]).split(":"))
        runs_ahead = options.pop("run_ahead", 0)
        policy = make_policy(self.policy, **options)
        if runs_ahead:
            policy.let_run_ahead()
        return policy


@dataclass(frozen=True, slots=True)
class Record:
    """One event and the decisions that followed it.

    `gap` is c_p - m of the event's worker once the event is counted; it may be negative where the slowest has left.
    """

    event: Event
    gap: int
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class Trace:
    """A whole run: how it began, and its events in the order of receipt."""

    start: Start
    records: list[Record]


@dataclass(frozen=True)
class Mismatch:
    """Where a replayed policy decided otherwise: record `place` (from 0) and what was decided this time."""

    place: int
    record: Record
    decided: tuple[Decision, ...]


class Recorder:
    """Writes every event to `path` as it happens, one JSON object a line; fits the server's `observe`.

    Args:
        path: the file, overwritten. A run that dies leaves whole lines.
        policy: the policy of the run; it is asked for its clocks only once it has been started.
        started: returns when it was started (s, the server's clock); asked once, at the first event.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path, policy: Policy, *, started: Callable[[], float]) -> None:
        self._policy, self._started = policy, started
        self._file = _open(path)
        self._begun = False

    def __call__(self, event: Event, decisions: list[Decision]) -> None:
        """Writes one event; called after the policy has decided."""
        if not self._begun:
            self._begun = True
            _write(self._file, _start_to_json(Start.of(self._policy, self._started())))
        record = Record(event, self._policy.clocks.gap(event.worker), tuple(decisions))
        _write(self._file, _record_to_json(record))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_trace(path: Path, trace: Trace) -> None:
    """Writes a whole run; ConfigError if the file cannot be written."""
    with _open(path) as file:
        _write(file, _start_to_json(trace.start))
        for record in trace.records:
            _write(file, _record_to_json(record))


def read_trace(path: Path) -> Trace:
    """Reads what a Recorder or `write_trace` wrote; ConfigError names the file and line that cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"trace {path} cannot be read ({reason}): give a file that --trace wrote") from None
    number = 1
    records: list[Record] = []
    try:
        start = _start_from_json(json.loads(lines[0]))
        for line in lines[1:]:
            number += 1
            records.append(_record_from_json(json.loads(line), start.num_workers))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"trace {path} line {number} is not a trace's ({type(error).__name__}: {error})") from None
    return Trace(start, records)


def replay(trace: Trace, policy: Policy | None = None) -> list[Mismatch]:
    """Feeds a run's events to a policy again and returns where it decides otherwise; none, by law 1.

    Args:
        trace: the run.
        policy: of the same name and options; None: made from the trace.
    """
    policy = policy or trace.start.make_policy()
    policy.start(trace.start.num_workers, trace.start.now)
    return list(_differences(trace.records, policy))


def _differences(records: Iterable[Record], policy: Policy) -> Iterator[Mismatch]:
    for place, record in enumerate(records):
        event = record.event
        decided = tuple(policy.on_push(event) if isinstance(event, Push) else policy.on_leave(event))
        if decided != record.decisions:
            yield Mismatch(place, record, decided)


def _open(path: Path) -> TextIO:
    try:
        return path.open("w", buffering=1, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be written ({error.strerror}): choose another file") from None


def _write(file: TextIO, fields: dict[str, Any]) -> None:
    file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def _start_to_json(start: Start) -> dict[str, Any]:
    fields: dict[str, Any] = {"format": _FORMAT, "policy": start.policy, "options": start.options}
    return fields | {"workers": start.num_workers, "now": start.now}


def _start_from_json(fields: dict[str, Any]) -> Start:
    if fields["format"] != _FORMAT:
        raise ValueError(f"its format is {fields['format']!r}, not {_FORMAT!r}")
    return Start(str(fields["policy"]), dict(fields["options"]), int(fields["workers"]), float(fields["now"]))


def _record_to_json(record: Record) -> dict[str, Any]:
    event = record.event
    fields: dict[str, Any] = {"event": type(event).__name__.lower(), "worker": event.worker, "now": event.now}
    return fields | {"gap": record.gap, "decisions": [decision_text(decision) for decision in record.decisions]}


def _record_from_json(fields: dict[str, Any], num_workers: int) -> Record:
    event = _EVENTS[fields["event"]](int(fields["worker"]), float(fields["now"]))
    if not 0 <= event.worker < num_workers:
        raise ValueError(f"worker {event.worker} is not one of {num_workers}")
    return Record(event, int(fields["gap"]), tuple(parse_decision(text) for text in fields["decisions"]))


def decision_text(decision: Decision) -> str:
    """Returns a decision as text: "apply 0 2", "drop 1", "release 3" or "continue 3"."""
    workers = decision.workers if isinstance(decision, Apply) else (decision.worker,)
    return " ".join([type(decision).__name__.lower(), *map(str, workers)])


def parse_decision(text: str) -> Decision:
    """Reads what `decision_text` returned; ValueError or KeyError for anything else."""
    word, *workers = text.split()
    numbers = tuple(int(worker) for worker in workers)
    if word == "apply":
        return Apply(numbers)
    (worker,) = numbers
    return _ONE_WORKER[word](worker)
