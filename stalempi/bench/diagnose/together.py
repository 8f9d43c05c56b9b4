"""Judges what the ranks of a job found about themselves and each other."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from stalempi.bench.diagnose.finding import Finding, fail, ok, warn

__all__ = ["judge_ranks"]

Report: TypeAlias = Mapping[str, Any]

_SLOW = 10.0  # times a quick one of its kind, at which a way between two ranks is worth a word
_NOTICED = 1e3  # microseconds there and back below which nobody minds


def judge_ranks(jobs: Sequence[Sequence[Report]], expected: int | None) -> list[Finding]:
    """Judges the worlds that came to be: one of `expected` ranks, or else something is wrong."""
    if len(jobs) > 1:
        said = f"{len(jobs)} worlds of size {len(jobs[0])} in place of one: mpirun and mpi4py's MPI are not of one kind"
        return [fail("world", said, "use the mpirun of the MPI that mpi4py uses, or srun --mpi=pmix under Slurm")]
    reports = jobs[0]
    if len(reports) == 1:
        return [fail("world", "MPI sees a world of size 1", "start it by the launcher of mpi4py's MPI, or give -n")]
    if expected not in (None, len(reports)):
        return [fail("world", f"{len(reports)} ranks, not {expected}", "see what else asks for ranks: --mpi-args?")]
    nodes = _nodes(reports)
    per_node = ", ".join(f"{host}: {len(ranks)}" for host, ranks in list(nodes.items())[:8])
    found = [ok("world", f"{len(reports)} ranks"), ok("ranks per node", per_node + (", ..." if len(nodes) > 8 else ""))]
    found.append(_versions(reports))
    found += [finding for host, ranks in nodes.items() for finding in _node(host, ranks)]
    return [*found, *_round_trips(reports)]


def _nodes(reports: Sequence[Report]) -> dict[str, list[Report]]:
    nodes: dict[str, list[Report]] = {}
    for report in reports:
        nodes.setdefault(report["host"], []).append(report)
    return nodes


def _versions(reports: Sequence[Report]) -> Finding:
    ours = reports[0]["versions"]
    for report in reports[1:]:
        for name, value in report["versions"].items():
            if value != ours[name]:
                where = f"rank {report['rank']} ({report['host']}) has {name} {value}, rank 0 has {ours[name]}"
                return fail("versions", where, "use one environment on all nodes: a shared folder, or one module")
    return ok("versions", "the same on all ranks")


def _node(host: str, ranks: Sequence[Report]) -> list[Finding]:
    found = [_binding(host, ranks)]
    together = set().union(*(rank["cores"] for rank in ranks))
    threads = [int(rank["threads"]) for rank in ranks if rank["threads"].isdigit()]
    if sum(threads) > len(together) >= len(ranks):
        found.append(
            warn(
                "threads",
                f"{host}: OMP_NUM_THREADS={threads[0]} for each of {len(ranks)} ranks, but {len(together)} cores",
                "unset OMP_NUM_THREADS (then every rank takes its share of the cores), or make it smaller",
            )
        )
    return found + _gpus(host, ranks)


def _binding(host: str, ranks: Sequence[Report]) -> Finding:
    name = "binding"
    together = set().union(*(rank["cores"] for rank in ranks))
    there = ranks[0]["cores_there"]
    if len(together) == 1 and len(ranks) > 1:
        return fail(
            name,
            f"{host}: all {len(ranks)} ranks are bound to one core of {there}",
            "--bind-to none, or leave taskset out; under Slurm ask for --cpus-per-task and no --cpu-bind",
        )
    if len(together) < len(ranks):
        return warn(
            name,
            f"{host}: {len(ranks)} ranks on {len(together)} cores take turns",
            "start fewer ranks there, or ask for more cores; results are right, timings are not",
        )
    single = sum(len(rank["cores"]) == 1 for rank in ranks)
    if single and len(together) > len(ranks):
        said = f"{host}: {single} rank(s) bound to one core each: no thread for data and sums"
        return warn(name, said, "--bind-to none, or more cores for each")
    return ok(name, f"{host}: {len(ranks)} ranks on {len(together)} of {there} cores")


def _gpus(host: str, ranks: Sequence[Report]) -> list[Finding]:
    names = Counter(rank["gpu"] for rank in ranks if rank["gpu"])
    if not names:
        return []
    shared = [name for name, count in names.items() if count > 1]
    without = sum(not rank["gpu"] for rank in ranks)
    if without:
        return [warn("GPU per rank", f"{host}: {without} rank(s) see no GPU", "let each rank see all GPUs of its node")]
    if shared:
        said = f"{host}: {names[shared[0]]} ranks share {shared[0]}"
        return [warn("GPU per rank", said, "start one rank for each GPU, and the server on the CPU (--device cpu)")]
    return [ok("GPU per rank", f"{host}: one each")]


def _round_trips(reports: Sequence[Report]) -> list[Finding]:
    hosts = [report["host"] for report in reports]
    measured: dict[bool, dict[tuple[int, int], list[float]]] = {True: {}, False: {}}
    for report in reports:
        for partner, figures in report["pairs"].items():
            pair = (report["rank"], int(partner))
            if not figures:
                said = (
                    f"rank {pair[0]} ({hosts[pair[0]]}) and rank {pair[1]} ({hosts[pair[1]]}) do not reach each other"
                )
                return [fail("round trips", said, "look for a firewall, or name the interface that all nodes share")]
            measured[hosts[pair[0]] == hosts[pair[1]]][pair] = figures
    return [_ways("within a node" if same else "between nodes", pairs) for same, pairs in measured.items() if pairs] + [
        _to_server({pair: figures for pairs in measured.values() for pair, figures in pairs.items() if 0 in pair})
    ]


def _ways(where: str, pairs: Mapping[tuple[int, int], list[float]]) -> Finding:
    name = f"round trips {where}"
    middle = statistics.median(figures[0] for figures in pairs.values())
    slowest = max(pairs, key=lambda pair: pairs[pair][0])
    rate = statistics.median(figures[1] for figures in pairs.values())
    longest = pairs[slowest][0]
    said = f"{len(pairs)} pairs: {middle:.1f} us, {rate:.2g} GB/s; slowest {slowest[0]}-{slowest[1]}: {longest:.1f} us"
    quick = sorted(figures[0] for figures in pairs.values())[len(pairs) // 4]
    if longest > max(_SLOW * quick, _NOTICED):
        return warn(name, said, f"look at the nodes of ranks {slowest[0]} and {slowest[1]}: busy, or on a slow link")
    return ok(name, said)


def _to_server(pairs: Mapping[tuple[int, int], list[float]]) -> Finding:
    times = [figures[0] for figures in pairs.values()]
    rate = min(figures[1] for figures in pairs.values())
    return ok("to the server", f"{min(times):.1f} to {max(times):.1f} us there and back, at least {rate:.2g} GB/s")
