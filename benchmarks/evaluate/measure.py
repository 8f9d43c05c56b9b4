"""Measures what a snapshot for the evaluator costs the server: mpirun -n 3 python benchmarks/evaluate/measure.py.

One server, one worker, one evaluator, a model of 100 MB. The server times each look at whether a snapshot is due, with
and without one, and beside each snapshot a plain copy of as many bytes, on the same machine at the same time.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import stalempi
from stalempi.train.snapshots import Gallery

STEPS, EVERY, WIDTH = 60, 3, 5_000


class Timed:
    """Stands before a gallery and times it."""

    def __init__(self, gallery: Gallery, model: nn.Module) -> None:
        self._gallery, self._looks = gallery, 0
        self._values = torch.cat([p.detach().view(-1) for p in model.parameters()])
        self._place = torch.empty_like(self._values).zero_()
        self.snapshots: list[float] = []
        self.idle: list[float] = []
        self.copies: list[float] = []

    def look(self, now: float) -> None:
        """Looks, and takes the time."""
        self._looks += 1
        is_snapshot = self._looks % EVERY == 0
        began = time.perf_counter()
        self._gallery.look(now)
        (self.snapshots if is_snapshot else self.idle).append(time.perf_counter() - began)
        if is_snapshot:
            began = time.perf_counter()
            self._place.copy_(self._values)
            self.copies.append(time.perf_counter() - began)

    def finish(self) -> None:
        """Finishes."""
        self._gallery.finish()


def measure(model: nn.Module) -> tuple[float, float]:
    time.sleep(0.05)
    return 0.0, float(next(model.parameters()).detach()[0, 0])


def main() -> None:
    context = stalempi.init(evaluator=True)
    torch.set_num_threads(1)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    evaluation = stalempi.Evaluation(measure, every=EVERY)  # each step stands for one sample
    optimizer = stalempi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model=model, policy=stalempi.ASP(), evaluation=evaluation
    )
    if context.is_evaluator:
        optimizer.evaluate()
    elif context.is_server:
        assert optimizer._gallery is not None
        timed = Timed(optimizer._gallery, model)
        optimizer._gallery = timed  # type: ignore[assignment]
        optimizer.serve()
        optimizer.evaluate()
        copy, snapshot, idle = (1e3 * statistics.median(t) for t in (timed.copies, timed.snapshots[2:], timed.idle))
        print("| parameters, MB | copy, ms | snapshot, ms | snapshot / copy | look without a snapshot, us |")
        print("| --- | ---: | ---: | ---: | ---: |")
        size = sum(p.nbytes for p in model.parameters()) / 1e6
        print(f"| {size:.0f} | {copy:.1f} | {snapshot:.1f} | {snapshot / copy:.2f} | {1e3 * idle:.0f} |")
        print(f"{len(evaluation.curve)} measured, {evaluation.skipped} replaced by later ones", flush=True)
    else:
        with optimizer:
            for _ in range(STEPS):
                optimizer.step(samples=1)


if __name__ == "__main__":
    main()
