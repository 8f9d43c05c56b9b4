"""Says what a checkpoint holds, and brings a server and its workers to where one was taken."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stalempi.errors import ConfigError
from stalempi.replica import Replica, only
from stalempi.roles import Role
from stalempi.server import Server
from stalempi.stats import RunStats, WorkerStats
from stalempi.train.checkpoint import CheckpointStore
from stalempi.train.notes import NOTE_BYTES, Notebook
from stalempi.worker import Worker

__all__ = ["Restart", "WorkerRestart", "describe"]


def describe(server: Server, now: float) -> dict[str, Any]:
    """Returns the state of a server at rest, at `now` (s), by part: the very tensors, not copies.

    Of several servers, the others send theirs. What is returned is as if there were one, but for the corrections.

    model       the state_dict, running statistics combined; it loads in plain torch
    optimizer   the state of the torch optimizer, by parameter
    server      clocks and counts
    workers     for each worker its note, running statistics, and whether it was computing
    """
    workers = server.policy.clocks.workers()
    correction = server.correction
    others = server.orders.collect()
    stats = asdict(server.stats)
    for each, more in zip(stats["workers"], server.orders.bytes_pushed, strict=True):
        each["bytes_pushed"] += more
    optimizer = dict(server.replica.optimizer.state_dict()["state"])
    for other in others:
        optimizer |= other["optimizer"]
    return {
        "model": server.replica.model.state_dict(),
        "optimizer": optimizer,
        "server": {
            "now": now,
            "layout": _layout(server.replica),
            "stats": stats,
            "policy": {"name": str(server.policy), "everybody": len(list(workers)) == len(server.slots)},
            "policy_state": server.policy.state(now),
            "correction": {
                "name": correction.name,
                "state": correction.state(),
                "others": [other["correction"] for other in others],
            }
            if correction
            else None,
        },
        "workers": [
            {
                "note": torch.frombuffer(slot.note, dtype=torch.uint8),
                # an empty push brings no running statistics
                "buffers": (slot if stats.iterations > stats.skipped else server.replica).buffers.storages,
                "iterations": stats.iterations,
                "running": server.policy.is_running(worker),
            }
            for worker, (slot, stats) in enumerate(zip(server.slots, server.stats.workers, strict=True))
        ],
    }


class Restart:
    """A checkpoint that the server goes on from.

    With the same workers, policy and options the policy goes on as it was. Otherwise, or where a worker had left, it
    starts anew, and only its total of pushes goes on.

    Args:
        path: a whole checkpoint.

    Raises ConfigError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = {part: CheckpointStore.load_part(path, part) for part in ("model", "optimizer", "server", "workers")}
        self._parts, self._server, self._workers = parts, parts["server"], parts["workers"]

    def load(self, replica: Replica) -> None:
        """Gives model and optimizer the saved values; ConfigError if they are of another program."""
        ours, saved = _layout(replica), self._server["layout"]
        if ours != saved:
            raise ConfigError(
                f"checkpoint {self.path} is of another model or optimizer: it has {only(saved, ours)} where this "
                f"program has {only(ours, saved)}"
            )
        replica.model.load_state_dict(self._parts["model"])
        state = {"state": self._parts["optimizer"], "param_groups": replica.optimizer.state_dict()["param_groups"]}
        replica.optimizer.load_state_dict(state)

    def for_workers(self, policy: object, num_workers: int, group_size: int, total_samples: int | None) -> bytes:
        """Returns what every rank that computes has to know, for `WorkerRestart`."""
        stats = self._server["stats"]
        same = self._is_same(num_workers, group_size * NOTE_BYTES)
        known = {
            "workers": self._workers if same else [{"note": worker["note"]} for worker in self._workers],
            "same": same,
            "everybody_runs": not (same and self._policy_goes_on(policy, num_workers)),
            "version": stats["updates"],
            "samples": stats["samples"],
            "stopping": total_samples is not None and stats["samples"] >= total_samples,
        }
        buffer = io.BytesIO()
        torch.save(known, buffer)
        return buffer.getvalue()

    def bring(self, server: Server, now: float) -> None:
        """Sets what a server knows whose policy has just been started, at `now` (s)."""
        same = self._is_same(len(server.slots), server.options.note_bytes)
        server.stats = self.stats(len(server.slots), now)
        for worker, slot in enumerate(server.slots):
            slot.version, slot.step = server.stats.updates, server.stats.workers[worker].iterations
            if same:
                slot.note[:] = self._workers[worker]["note"].numpy().tobytes()
                for mine, saved in zip(slot.buffers.storages, self._workers[worker]["buffers"], strict=True):
                    mine.copy_(saved)
        corrections = self._corrections(server)
        if server.correction and corrections[0]:
            server.correction.load_state(corrections[0])
        state: dict[str, Any] = self._server["policy_state"]
        if same and self._policy_goes_on(server.policy, len(server.slots)):
            server.policy.load_state(state, now)
        else:
            server.policy.clocks.total = int(state["clocks"]["total"])

    def hand_out(self, server: Server) -> None:
        """Gives each other server the part of the state that is of its share, and keeps the rest."""
        optimizer, replicas = server.replica.optimizer, server.orders.replicas
        place = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        saved = self._parts["optimizer"]
        states = []
        for replica, correction in zip(replicas, self._corrections(server)[1:], strict=True):
            ours = [place[id(parameter)] for parameter in replica.trained]
            states.append(
                {
                    "optimizer": {n: saved[n] for n in ours if n in saved},
                    "updates": server.stats.updates,
                    "samples": server.stats.samples,
                    "iterations": [worker.iterations for worker in server.stats.workers],
                    "correction": correction,
                }
            )
            for parameter in replica.trained:
                optimizer.state.pop(parameter, None)
        server.orders.hand_out(states)

    def _corrections(self, server: Server) -> list[dict[str, Any] | None]:
        """Returns what each server's correction goes on from; None where it begins anew, as with other shares."""
        saved, servers = self._server["correction"], 1 + len(server.orders.replicas)
        if not saved or not server.correction or saved["name"] != server.correction.name:
            return [None] * servers
        found = [saved["state"], *saved.get("others", ())]
        return found if len(found) == servers else [None] * servers

    def stats(self, num_workers: int, now: float) -> RunStats:
        """Returns the counts to go on from; times moved to a clock that shows `now` (s)."""
        saved = self._server["stats"]
        shift = now - self._server["now"]
        workers, former = ([WorkerStats(**each) for each in saved[key]] for key in ("workers", "former"))
        for worker in [*workers, *former]:
            worker.started += shift
            worker.ended += shift
        started = saved["started"] + shift
        if len(workers) != num_workers:
            former += [worker for worker in workers if worker.iterations]
            workers = [WorkerStats(started=started, ended=started) for _ in range(num_workers)]
        return RunStats(**{**saved, "workers": workers, "former": former, "started": started})

    def _is_same(self, num_workers: int, note_bytes: int) -> bool:
        """Whether there are as many workers as in the checkpoint, each of as many ranks."""
        return len(self._workers) == num_workers and all(len(each["note"]) == note_bytes for each in self._workers)

    def _policy_goes_on(self, policy: object, num_workers: int) -> bool:
        saved = self._server["policy"]
        return len(self._workers) == num_workers and saved["name"] == str(policy) and bool(saved["everybody"])


class WorkerRestart:
    """What a worker goes on from, as the server has sent it.

    Args:
        known: what `Restart.for_workers` returned.
        role: this rank's: its worker, and its place in it.
    """

    def __init__(self, known: bytes, role: Role) -> None:
        self._known = torch.load(io.BytesIO(known), map_location="cpu", weights_only=True)
        self._own = self._note = None
        self._notes = [
            bytes(note.numpy()) for worker in self._known["workers"] for note in worker["note"].split(NOTE_BYTES)
        ]
        if self._known["same"]:
            assert role.worker_rank is not None
            assert role.shard_rank is not None
            self._own, self._note = self._known["workers"][role.worker_rank], self._notes[role.shard_rank]

    def load(self, replica: Replica, notebook: Notebook) -> None:
        """Gives this rank its own running statistics and its random numbers, and the notebook all positions."""
        notebook.load(self._notes, self._note)
        if self._own:
            for mine, saved in zip(replica.buffers.storages, self._own["buffers"], strict=True):
                mine.copy_(saved)

    def bring(self, worker: Worker) -> None:
        """Sets what the worker knows; one that had pushed and waited then waits here for its release."""
        worker.version, worker.global_samples = self._known["version"], self._known["samples"]
        worker.stopping = self._known["stopping"]
        if self._own:
            worker.go_on_from(self._own["iterations"])
            if not (self._own["running"] or self._known["everybody_runs"]):
                worker.rejoin()


def _layout(replica: Replica) -> list[str]:
    """Returns what must be the same in the program that resumes; buckets may differ."""
    return [line for line in replica.describe(whole=True) if not line.startswith("bucket_bytes")]
