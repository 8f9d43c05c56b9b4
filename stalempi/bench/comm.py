"""Is stalempi-bench comm: what a push and its release take by size, beside what the machine could do."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

import stalempi
from stalempi.bench.launch import is_launched, launch_from, launch_options, relaunch
from stalempi.bench.options import policy_from, policy_options_with
from stalempi.bench.picture import draw_exchange, need_matplotlib
from stalempi.bench.progress import console
from stalempi.bench.report import check_writable, environment
from stalempi.errors import ConfigError
from stalempi.roles import assign_role
from stalempi.shares import check_servers

__all__ = ["Timing", "comm", "parse_sizes", "row_of"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Timing:
    """How long one iteration takes a worker (s, median), and how many all workers make in a second."""

    seconds: float
    rate: float


@click.command()
@click.option("-n", "--ranks", type=int, help="Ranks to start: 1 server and RANKS - 1 workers. Not under a launcher.")
@launch_options
@click.option("--servers", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks that share each push.")
@policy_options_with("asp")
@click.option(
    "--sizes", default="1KB..100MB", show_default=True, help="Of a push: FROM..TO in powers of ten, or with commas."
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each rival.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="For the ceiling.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write comm.json, .md and .png here.")
def comm(**words: Any) -> None:
    """Measure push and release by size, beside plain MPI, memcpy and gloo's allreduce in the same run.

    push: the exchange of a worker with the server; step: a whole optimizer step with the server's update; raw: a plain
    Isend/Irecv pair of the same bytes each way, whole or in buckets, whichever is faster; gloo: torch's allreduce
    between two processes. The ceiling is what the server's link allows, batch x bandwidth / bytes, in samples/s of all
    workers together. Rivals take turns; figures are medians.
    """
    launched, launch = is_launched(os.environ), launch_from(words)
    ranks = words.pop("ranks")
    if not launched and ranks is None:
        raise ConfigError("say how many ranks to start, as in -n 2: one server and one worker")
    if ranks is not None and ranks < 2:
        raise ConfigError(f"-n {ranks}: a job needs at least 2 ranks")
    policy, sizes = policy_from(words), parse_sizes(words["sizes"])
    check_servers(policy, words["servers"], clip_norm=None)
    if ranks is not None:
        assign_role(0, ranks, servers=words["servers"])
    if min(sizes) < 4 * words["servers"]:
        raise ConfigError(f"--sizes from {_bytes(min(sizes))}: {words['servers']} servers share at least 4 bytes each")
    if words["out"]:
        need_matplotlib()
    if launched:
        _measure(policy, sizes, words)
        return
    if words["out"]:
        check_writable(words["out"])
    _check_memory(max(sizes), ranks)
    relaunch(ranks, sys.argv[1:], launch)


def parse_sizes(text: str) -> list[int]:
    """Reads "1KB..10MB" (powers of ten) or "1KB,3MB"; bytes, whole floats; ConfigError otherwise."""
    low, dots, high = text.partition("..")
    if not dots:
        return [_size(word) for word in text.split(",")]
    sizes, last = [_size(low)], _size(high)
    while sizes[-1] * 10 <= last:
        sizes.append(sizes[-1] * 10)
    if last < sizes[0]:
        raise ConfigError(f"--sizes {text}: the second is smaller than the first")
    return sizes


def _size(word: str) -> int:
    match = re.fullmatch(r"(\d+)(B|KB|MB|GB)", word.strip())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < 4 or size % 4:
        raise ConfigError(f"--sizes: {word.strip()!r} is no size in whole float32, such as 1KB, 40MB or 1GB")
    return size


def _check_memory(size: int, ranks: int) -> None:
    """Raises ConfigError if the largest size does not fit here: 3 copies a worker, 1 + workers copies the server."""
    needed = size * (4 * ranks + 2)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise ConfigError(
            f"--sizes up to {_bytes(size)} with {ranks} ranks takes about {needed / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free: give smaller sizes or fewer ranks"
        )


def _measure(policy: stalempi.Policy, sizes: Sequence[int], words: dict[str, Any]) -> None:
    context = stalempi.init(device="cpu", servers=words["servers"])
    from stalempi.bench.exchange import measure  # noqa: PLC0415 - imports MPI, which starts it

    workers = context.num_workers if policy.has_server else context.size
    if context.rank == 0:
        shared = f", {words['servers']} servers" if words["servers"] > 1 else ""
        click.echo(
            f"stalempi {stalempi.__version__}: {policy}, {workers} worker(s){shared}, {context.transport.description}"
        )
    rows = []
    for size in sizes:
        found = measure(context, policy, size, repeats=words["repeats"])
        rows.append(row_of(size, found, words["batch_size"]))
    if context.rank:
        return
    screen = console(sys.stdout)
    screen.width = max(screen.width, 120)
    screen.print(_table(rows), highlight=False)
    if words["out"]:
        result = {"policy": str(policy), "workers": workers, "servers": words["servers"], "rows": rows}
        result["environment"] = environment(context.transport.description) | {"buffers": context.transport.buffers}
        (words["out"] / "comm.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (words["out"] / "comm.md").write_text(_markdown(rows), encoding="utf-8")
        draw_exchange(rows, f"{policy}, {workers} worker(s)", words["out"] / "comm.png")
        click.echo(f"written: {words['out']}/comm.md, .png and .json")


def row_of(size: int, found: dict[str, Timing], batch_size: int) -> dict[str, Any]:
    """Returns the figures of one size: times in s, rates in B/s, and the ratios that follow."""
    ours = found.get("push", found["step"])
    raw = min((found[name] for name in ("raw", "raw in buckets") if name in found), key=lambda timing: timing.seconds)
    goodput, memcpy = 2 * size * ours.rate, size * found["memcpy"].rate
    row: dict[str, Any] = {"bytes": size, "timings": {name: asdict(timing) for name, timing in found.items()}}
    row |= {"raw_seconds": raw.seconds, "times_raw": ours.seconds / raw.seconds}
    row |= {"goodput": goodput, "memcpy": memcpy, "share_of_memcpy": goodput / memcpy}
    row |= {"ceiling_samples_per_second": batch_size * raw.rate, "share_of_ceiling": found["step"].rate / raw.rate}
    row["faster_than_gloo"] = found["gloo"].seconds / ours.seconds if "gloo" in found else None
    return row


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "size": lambda row: _bytes(row["bytes"]),
    "push": lambda row: _time(row, "push"),
    "step": lambda row: _time(row, "step"),
    "raw": lambda row: _seconds(row["raw_seconds"]),
    "x raw": lambda row: f"{row['times_raw']:.2f}",
    "gloo": lambda row: _time(row, "gloo"),
    "gloo/ours": lambda row: "-" if row["faster_than_gloo"] is None else f"{row['faster_than_gloo']:.1f}",
    "GB/s": lambda row: f"{row['goodput'] / 1e9:.2f}",
    "memcpy": lambda row: f"{row['memcpy'] / 1e9:.2f}",
    "ceiling/s": lambda row: f"{row['ceiling_samples_per_second']:.0f}",
    "reached": lambda row: f"{100 * row['share_of_ceiling']:.0f}%",
}


def _bytes(size: int) -> str:
    unit = next(unit for unit in ("GB", "MB", "KB", "B") if size >= _UNITS[unit])
    return f"{size / _UNITS[unit]:g}{unit}"


def _time(row: dict[str, Any], name: str) -> str:
    return _seconds(row["timings"][name]["seconds"]) if name in row["timings"] else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(*_COLUMNS, box=None, pad_edge=False, padding=(0, 1))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        table.add_row(*(cell(row) for cell in _COLUMNS.values()))
    return table


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + " ---: |" * len(_COLUMNS)]
    lines += ["| " + " | ".join(cell(row) for cell in _COLUMNS.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"
