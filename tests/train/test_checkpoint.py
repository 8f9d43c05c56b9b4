"""A checkpoint is whole or absent, and a run that goes on from one loses no push and repeats none."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stalempi import preempt
from stalempi.correction import make_correction
from stalempi.errors import ConfigError
from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Policy
from stalempi.train.checkpoint import CheckpointStore
from stalempi.train.keeper import Checkpoint
from stalempi.train.loader import DataLoader
from stalempi.train.optimizer import DistributedOptimizer
from stalempi.train.sampler import DistributedSampler
from stalempi.transport.inproc import InprocTransport, run_ranks
from tests.job import Job, make_context, run_job
from tests.small import data, largest_difference, step

SIZE, BATCH = 96, 4

torch.set_num_threads(1)


def write(store: CheckpointStore, value: Any) -> Path:
    name = store.next_name()
    store.begin(name)
    store.write_part(name, "a", value)
    return store.commit(name)


def test_parts_come_back_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new" / "folder", keep=2)
    assert store.newest() is None
    for number in range(4):
        write(store, {"number": number, "tensor": torch.full((3,), number)})
    assert [path.name for path in store.whole()] == ["checkpoint-000003", "checkpoint-000004"]
    newest = CheckpointStore.find(store.folder)
    assert newest == store.newest()
    found = CheckpointStore.load_part(newest, "a")
    assert found["number"] == 3
    assert torch.equal(found["tensor"], torch.full((3,), 3))


def test_several_writers_and_what_a_dead_one_left(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin("step-1")
    store.write_part("step-1", "block0", [1])
    assert store.newest() is None
    store.begin("step-2")
    CheckpointStore(tmp_path).write_part("step-2", "block0", [2])
    CheckpointStore(tmp_path).write_part("step-2", "block1", [3])
    path = store.commit("step-2")
    assert [CheckpointStore.load_part(path, part) for part in ("block0", "block1")] == [[2], [3]]
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def spoil_sum(path: Path) -> None:
    content = bytearray((path / "a.pt").read_bytes())
    content[content.find(b"\x2a\x2a\x2a\x2a")] ^= 1
    (path / "a.pt").write_bytes(content)


def spoil_version(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_sum, "a.pt is damaged"),
        (spoil_version, "has version 99, this stalempi reads up to 1: update it"),
        (lambda path: (path / "a.pt").unlink(), "cannot be read as part of a checkpoint"),
        (lambda path: (path / "a.pt").write_bytes(b"PK"), "is damaged .its size."),
        (lambda path: (path / "manifest.json").write_text('{"format": "other"}'), "no checkpoint of stalempi"),
        (lambda path: (path / "manifest.json").unlink(), "holds no checkpoint"),
    ],
    ids=["a flipped bit", "too new", "a part is gone", "cut short", "foreign", "no manifest"],
)
def test_what_cannot_be_read_is_said_in_a_line(tmp_path: Path, spoil: Callable[[Path], object], said: str) -> None:
    path = write(CheckpointStore(tmp_path), torch.full((1000,), 0x2A, dtype=torch.uint8))
    spoil(path)
    with pytest.raises(ConfigError, match=said) as raised:
        CheckpointStore.load_part(CheckpointStore.find(path), "a")
    assert "\n" not in str(raised.value)


def test_a_checkpoint_cut_short_is_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first, second = write(store, [1]), write(store, [2])
    (second / "a.pt").write_bytes(b"PK")
    assert store.newest() == first
    assert store.next_name() == "checkpoint-000003"


@pytest.mark.parametrize("every", [0, -5, "0s", "5 minutes", "x", 1.5])
def test_times_that_cannot_be_are_refused(every: Any) -> None:
    with pytest.raises(ConfigError, match="a checkpoint every"):
        Checkpoint("folder", every=every)
    with pytest.raises(ConfigError, match="keep at least 1"):
        Checkpoint("folder", keep=0)


class Net(nn.Module):
    """A model with all that a run has to bring back: running statistics, dropout, a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.dropout, self.second = nn.Dropout(0.3), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.dropout(torch.tanh(self.norm(self.first(x)))) * self.scale)
        return out


def make_net() -> nn.Module:
    torch.manual_seed(5)
    return Net()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


class Run:
    """Trains Net on SIZE points until `total` samples, noting which samples were pushed; may be cut after `cut`.

    The ranks are threads and share torch's generator, so dropout is switched off where bits are compared.
    """

    def __init__(
        self,
        folder: Path,
        policy: Callable[[], Policy],
        *,
        workers: int = 2,
        dropout: bool = False,
        group: int = 1,
    ) -> None:
        self.folder, self.policy, self.dropout, self.group = folder, policy, dropout, group
        self.workers = workers * group  # ranks that compute
        self.seen: list[list[int]] = []  # samples of every step that returned, by worker
        self.pushed: list[list[list[int]]] = []  # batches of every step that began

    def go(self, *, total: int = 10**6, cut: int | None = None, **options: Any) -> Job | None:
        """Runs; `cut`: worker 0 is asked to end (by a signal, as it were) at its push number `cut`; None then."""
        x, y = data(SIZE)
        self.seen, self.pushed = [[] for _ in range(self.workers)], [[] for _ in range(self.workers)]

        def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
            model.train()
            if not self.dropout:
                model.get_submodule("dropout").eval()
            sampler = DistributedSampler(SIZE, num_workers=self.workers, worker_rank=worker, seed=1)
            loader: Any = DataLoader(torch.arange(SIZE), BATCH, sampler=sampler)
            optimizer.track(loader)
            taken = 0
            while not optimizer.done:
                for indices in loader:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
                    taken += 1
                    if cut == taken and worker == 0:
                        preempt._signal = "SIGTEST"
                    self.pushed[worker].append(indices.tolist())
                    optimizer.step(samples=len(indices))
                    self.seen[worker] += indices.tolist()
                    if optimizer.done:
                        break

        options = {"checkpoint": Checkpoint(self.folder)} | options | {"total_samples": total}
        try:
            return run_job(
                make_net, adam, self.policy(), train, workers=self.workers // self.group, group=self.group, **options
            )
        except preempt.Preempted:
            return None
        finally:
            preempt._signal = None


def stream(worker: int, num_workers: int) -> Iterator[list[int]]:
    """Yields the batches of a worker that nothing stops."""
    sampler = DistributedSampler(SIZE, num_workers=num_workers, worker_rank=worker, seed=1)
    while True:
        indices = iter(sampler)
        while batch := list(itertools.islice(indices, BATCH)):
            yield batch


def balance(job: Job, total: int) -> None:
    """Checks that every sample counted was pushed by some worker and applied once."""
    stats = job.stats
    everybody = [*stats.workers, *stats.former]
    assert stats.samples == sum(worker.samples for worker in everybody) >= total
    assert sum(worker.applied for worker in everybody) == sum(worker.iterations for worker in everybody)


@pytest.mark.parametrize("correction", ["none", "gap-aware"])
def test_a_bsp_run_that_was_stopped_twice_equals_an_unbroken_one_bit_for_bit(tmp_path: Path, correction: str) -> None:
    broken = Run(tmp_path / "broken", BSP)
    assert broken.go(total=480, cut=7, correction=make_correction(correction)) is None
    assert broken.go(total=480, cut=13, correction=make_correction(correction)) is None
    job = broken.go(total=480, correction=make_correction(correction))
    whole = Run(tmp_path / "whole", BSP).go(total=480, correction=make_correction(correction))
    assert job is not None
    assert whole is not None
    assert largest_difference(job.model, whole.model) == 0.0
    assert all(largest_difference(a, b) == 0.0 for a, b in zip(job.workers, whole.workers, strict=True))
    assert job.stats.updates == whole.stats.updates == 60
    assert [w.iterations for w in job.stats.workers] == [w.iterations for w in whole.stats.workers]
    balance(job, 480)


def parameters_differ(a: nn.Module, b: nn.Module) -> bool:
    return any(not torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("policy", [BSP, lambda: SSP(1)], ids=["bsp", "ssp"])
def test_groups_go_on_where_each_of_their_ranks_was(tmp_path: Path, policy: Callable[[], Policy]) -> None:
    """Two workers of two ranks; under BSP the parameters are those of an unbroken run, to the last bit."""
    broken = Run(tmp_path / "broken", policy, group=2)
    batches = [list(itertools.islice(stream(rank, 4), 100)) for rank in range(4)]
    counts = [0, 0]
    for cut in (5, 3, None):
        job = broken.go(total=640, cut=cut)
        for rank, pushed in enumerate(broken.pushed):
            first = counts[rank // 2]
            assert pushed == batches[rank][first : first + len(pushed)]
        newest = CheckpointStore(tmp_path / "broken").newest()
        assert newest is not None
        counts = [w["iterations"] for w in CheckpointStore.load_part(newest, "server")["stats"]["workers"]]
    assert job is not None
    balance(job, 640)
    if policy is BSP:
        whole = Run(tmp_path / "whole", BSP, group=2).go(total=640)
        assert whole is not None
        assert not parameters_differ(job.model, whole.model)
        assert parameters_differ(job.model, make_net())


@pytest.mark.parametrize(("workers", "group"), [(4, 1), (1, 2), (3, 2)])
def test_other_groups_share_the_rest_of_the_epoch(tmp_path: Path, workers: int, group: int) -> None:
    first = Run(tmp_path, BSP, workers=2, group=2)
    assert first.go(total=600, cut=2) is None
    taken = [index for rank in first.seen for index in rank]
    second = Run(tmp_path, BSP, workers=workers, group=group)
    job = second.go(total=SIZE)
    assert job is not None
    rest = [index for rank in second.seen for index in rank]
    assert len(rest) == len(set(rest))
    assert set(rest).isdisjoint(taken)
    balance(job, SIZE)


POLICIES: list[Callable[[], Policy]] = [
    ASP,
    lambda: SSP(1),
    lambda: CachedSSP(1),
    lambda: DSSP(0, 4),
    lambda: DSSP(1, 3, controller="moment", predictor="mean-std"),
    lambda: DSSP(1, 3, controller="paper-capped"),
    lambda: BSP(backup=1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda make: str(make()))
def test_under_every_policy_the_books_balance_after_two_stops(tmp_path: Path, policy: Callable[[], Policy]) -> None:
    """Each worker goes on with the very batch after the last one that the checkpoint had: none lost, none repeated."""
    run = Run(tmp_path, policy, workers=3, dropout=True)
    batches = [list(itertools.islice(stream(worker, 3), 200)) for worker in range(3)]
    counts = [0, 0, 0]
    for total, cut in ((600, 5), (600, 5), (600, None)):
        job = run.go(total=total, cut=cut)
        for worker, pushed in enumerate(run.pushed):
            assert pushed == batches[worker][counts[worker] : counts[worker] + len(pushed)]
        newest = CheckpointStore(tmp_path).newest()
        assert newest is not None
        counts = [w["iterations"] for w in CheckpointStore.load_part(newest, "server")["stats"]["workers"]]
    assert job is not None
    stats = job.stats
    assert counts == [worker.iterations for worker in stats.workers]
    assert all(worker.applied + worker.dropped == worker.iterations for worker in stats.workers)
    assert stats.samples == sum(worker.samples for worker in stats.workers) >= 600
    assert stats.samples == BATCH * sum(worker.applied for worker in stats.workers)


@pytest.mark.parametrize("then", [1, 2, 4])
def test_another_number_of_workers_shares_the_rest_of_the_epoch(tmp_path: Path, then: int) -> None:
    """3 workers stop within the first epoch; the new ones take exactly what those had not taken."""
    first = Run(tmp_path, BSP, workers=3)
    assert first.go(total=600, cut=3) is None
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    pushed = sum(w["samples"] for w in CheckpointStore.load_part(newest, "server")["stats"]["workers"])
    taken = [index for worker in first.seen for index in worker]
    assert pushed == 36
    second = Run(tmp_path, BSP, workers=then)
    job = second.go(total=SIZE)  # to the end of the epoch
    assert job is not None
    rest = [index for worker in second.seen for index in worker]
    assert len(taken) <= pushed  # the last push was applied, but its step did not return
    assert len(rest) == len(set(rest))
    assert set(rest).isdisjoint(taken)
    assert job.stats.samples == SIZE
    assert sum(w.samples for w in job.stats.former) == pushed
    balance(job, SIZE)


def test_the_model_part_loads_in_plain_torch_and_is_what_the_server_had(tmp_path: Path) -> None:
    job = Run(tmp_path, ASP).go(total=80)
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert job is not None
    model = Net()
    model.load_state_dict(torch.load(newest / "model.pt", weights_only=True), strict=True)
    assert largest_difference(model, job.model) == 0.0


def test_a_run_that_is_over_has_nothing_left_to_do_and_can_be_made_longer(tmp_path: Path) -> None:
    run = Run(tmp_path, BSP)
    first, again = run.go(total=80), run.go(total=80)
    assert first is not None
    assert again is not None
    assert run.seen == [[], []]
    assert largest_difference(first.model, again.model) == 0.0
    assert again.stats.updates == first.stats.updates == 10
    longer = run.go(total=160)
    whole = Run(tmp_path / "whole", BSP).go(total=160)
    assert longer is not None
    assert whole is not None
    assert largest_difference(longer.model, whole.model) == 0.0


def test_who_has_only_sent_empty_pushes_keeps_the_running_statistics_of_the_model(tmp_path: Path) -> None:
    """A gradient scaler begins with steps that it skips; an empty push brings no running statistics."""
    x, y = data(16)

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        if worker:
            optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]  # as a GradScaler sets it
        for _ in range(2):
            step(model, optimizer, x, y)

    job = run_job(make_net, adam, BSP(), train, workers=2, checkpoint=Checkpoint(tmp_path))
    assert [stats.skipped for stats in job.stats.workers] == [0, 2]
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    workers = CheckpointStore.load_part(newest, "workers")
    for first, second in zip(workers[0]["buffers"], workers[1]["buffers"], strict=True):
        assert torch.equal(first, second)


def test_the_rate_of_a_resumed_run_is_that_of_its_samples(tmp_path: Path) -> None:
    rates: list[float] = []

    def main(transport: InprocTransport) -> None:
        model, context = models[transport.rank], make_context(transport)
        options: Any = {"checkpoint": Checkpoint(tmp_path), "schedule": lambda samples: 0.5 if samples < 16 else 0.25}
        with DistributedOptimizer(adam(model), model=model, policy=BSP(), context=context, **options) as optimizer:
            if context.is_server:
                rates.append(optimizer.rate)
                optimizer.serve()
                rates.append(optimizer.rate)
            else:
                step(model, optimizer, *data(16))

    for _ in range(2):
        models = [make_net(), make_net()]
        run_ranks(main, 2)
    assert rates == [0.005, 0.005, 0.0025, 0.0025]


def test_checkpoints_come_every_so_many_samples(tmp_path: Path) -> None:
    run = Run(tmp_path, BSP)
    job = run.go(total=200, checkpoint=Checkpoint(tmp_path, every=40, keep=100))
    assert job is not None
    counts = [
        CheckpointStore.load_part(path, "server")["stats"]["samples"] for path in CheckpointStore(tmp_path).whole()
    ]
    assert counts[-1] == 200
    assert counts[0] == 40
    assert all(b - a >= 40 for a, b in itertools.pairwise(counts[:-1]))


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    assert Run(tmp_path, ASP).go(total=40) is not None

    def other() -> nn.Module:
        return nn.Linear(4, 3)

    with pytest.raises(ConfigError, match=r"another model or optimizer: it has .*'parameter first.weight"):
        run_job(other, adam, ASP(), lambda *_: None, workers=1, checkpoint=Checkpoint(tmp_path), stall_timeout=1.0)


def test_without_a_folder_the_job_still_stops_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Run(tmp_path, lambda: SSP(2)).go(total=10**6, cut=4, checkpoint=None) is None
    said = capsys.readouterr().err
    assert "stopped by SIGTEST after" in said
    assert "no checkpoint, since no folder for them was given; exit code 75" in said
    assert list(tmp_path.iterdir()) == []


def test_a_torch_scheduler_is_brought_back_by_the_step_count(tmp_path: Path) -> None:
    x, y = data(8)
    rates: list[tuple[int, float]] = []

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        for _ in range(optimizer.step_count):
            scheduler.step()
        while optimizer.step_count < 10:
            rates.append((optimizer.step_count, optimizer.param_groups[0]["lr"]))
            if len(rates) == 5:
                preempt._signal = "SIGTEST"
            step(model, optimizer, x, y)
            scheduler.step()

    def go() -> Job:
        return run_job(make_net, adam, BSP(), train, workers=1, checkpoint=Checkpoint(tmp_path))

    with pytest.raises(preempt.Preempted):
        go()
    preempt._signal = None
    go()
    assert {steps for steps, _ in rates} == set(range(10))
    assert all(rate == pytest.approx(0.01 * 0.5 ** (steps // 3)) for steps, rate in rates)


def test_a_signal_wakes_a_server_that_waits(tmp_path: Path) -> None:
    """Both workers compute for long; the checkpoint is there before they come to their next step."""
    seen: list[bool] = []

    def train(model: nn.Module, optimizer: DistributedOptimizer, worker: int) -> None:
        step(model, optimizer, *data(8))
        if worker == 0:
            preempt._signal = "SIGTEST"
        until = time.monotonic() + 10
        while CheckpointStore(tmp_path).newest() is None and time.monotonic() < until:
            time.sleep(0.02)
        seen.append(CheckpointStore(tmp_path).newest() is not None)
        step(model, optimizer, *data(8))

    with pytest.raises(preempt.Preempted):
        run_job(make_net, adam, BSP(), train, workers=2, checkpoint=Checkpoint(tmp_path))
    preempt._signal = None
    assert seen == [True, True]
    assert not [t for t in threading.enumerate() if t.name == "stalempi-checkpoint"]
