"""What the ranks found is judged, and how findings are shown."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalempi.bench.diagnose.finding import Level, fail, ok, show, warn, worst
from stalempi.bench.diagnose.library import judge_library, judge_shared_settings, vendor_of
from stalempi.bench.diagnose.probe import Answer, ask
from stalempi.bench.diagnose.rounds import partners
from stalempi.bench.diagnose.together import judge_ranks
from stalempi.bench.launchers import Vendor


def report(rank: int, size: int, **changes: Any) -> dict[str, Any]:
    pairs = {str(other): [2.0, 5.0] for other in range(rank + 1, size)}
    plain = {"rank": rank, "size": size, "local_rank": rank, "host": "n1", "cores": [0, 1, 2, 3], "cores_there": 4}
    return {**plain, "threads": "", "gpu": "", "versions": {"torch": "2.1", "MPI": "X 1"}, "pairs": pairs, **changes}


def levels(jobs: list[list[dict[str, Any]]], expected: int | None = None) -> dict[str, tuple[Level, str]]:
    return {f.name: (f.level, f.said) for f in judge_ranks(jobs, expected) if f.level} or {"all": (Level.OK, "")}


def test_a_sound_job_is_green() -> None:
    found = judge_ranks([[report(rank, 3) for rank in range(3)]], 3)
    assert worst(found) is Level.OK
    assert {"world", "ranks per node", "binding", "to the server", "round trips within a node"} <= {
        f.name for f in found
    }


def test_worlds_of_one() -> None:
    found = levels([[report(0, 1)], [report(0, 1)]], 2)
    assert found == {
        "world": (Level.FAIL, "2 worlds of size 1 in place of one: mpirun and mpi4py's MPI are not of one kind")
    }


def test_another_number_of_ranks() -> None:
    assert levels([[report(0, 2), report(1, 2)]], 3) == {"world": (Level.FAIL, "2 ranks, not 3")}


def test_versions_that_differ_name_rank_and_node() -> None:
    other = report(1, 2, host="n2", versions={"torch": "2.2", "MPI": "X 1"})
    level, said = levels([[report(0, 2), other]])["versions"]
    assert (level, said) == (Level.FAIL, "rank 1 (n2) has torch 2.2, rank 0 has 2.1")


@pytest.mark.parametrize(
    ("cores", "level", "said"),
    [
        ([[0], [0]], Level.FAIL, "all 2 ranks are bound to one core of 4"),
        ([[0, 1], [0, 1], [0, 1]], Level.WARN, "3 ranks on 2 cores take turns"),
        ([[0], [1, 2, 3]], Level.WARN, "1 rank(s) bound to one core each"),
    ],
)
def test_binding(cores: list[list[int]], level: Level, said: str) -> None:
    found = levels([[report(rank, len(cores), cores=own) for rank, own in enumerate(cores)]])["binding"]
    assert found[0] is level
    assert said in found[1]


def test_too_many_threads() -> None:
    level, said = levels([[report(rank, 2, threads="3") for rank in range(2)]])["threads"]
    assert level is Level.WARN
    assert "OMP_NUM_THREADS=3 for each of 2 ranks, but 4 cores" in said


@pytest.mark.parametrize(("gpus", "said"), [(["A", "A"], "2 ranks share A"), (["A", ""], "1 rank(s) see no GPU")])
def test_gpus(gpus: list[str], said: str) -> None:
    assert said in levels([[report(rank, 2, gpu=gpu) for rank, gpu in enumerate(gpus)]])["GPU per rank"][1]
    assert levels([[report(rank, 2, gpu=gpu) for rank, gpu in enumerate("AB")]]) == {"all": (Level.OK, "")}


def test_a_slow_way_names_its_ends_and_a_silent_one_fails() -> None:
    reports = [report(rank, 4) for rank in range(4)]
    reports[1]["pairs"]["3"] = [90_000.0, 0.01]
    assert "slowest 1-3" in levels([reports])["round trips within a node"][1]
    reports[1]["pairs"]["3"] = []
    assert levels([reports]) == {"round trips": (Level.FAIL, "rank 1 (n1) and rank 3 (n1) do not reach each other")}


@given(st.integers(2, 40))
def test_all_meet_once_and_both_at_the_same_time(size: int) -> None:
    """Played with blocking meetings, nobody is left waiting, and every pair has met once."""
    plans = [partners(rank, size) for rank in range(size)]
    for rank, plan in enumerate(plans):
        assert sorted(plan) == [other for other in range(size) if other != rank]
    places = [0] * size
    moved = True
    while moved:
        moved = False
        for rank in range(size):
            if places[rank] < len(plans[rank]):
                other = plans[rank][places[rank]]
                if places[other] < len(plans[other]) and plans[other][places[other]] == rank:
                    places[rank] += 1
                    places[other] += 1
                    moved = True
    assert places == [size - 1] * size


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("Open MPI v4.1.4, package: Debian", Vendor("openmpi", 4)),
        ("MPICH Version:\t4.0.2\nMPICH Release", Vendor("mpich", 4)),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", Vendor("intel", 2021)),
        ("MVAPICH Version:\t3.0", Vendor("mpich", 3)),
    ],
)
def test_a_library_is_known_by_what_it_says(library: str, expected: Vendor) -> None:
    assert vendor_of(library) == expected


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("OMPI_MCA_btl", "^sm", True),
        ("OMPI_MCA_btl", "^openib", False),
        ("OMPI_MCA_btl", "self,vader", False),
        ("UCX_TLS", "tcp,self", True),
        ("UCX_TLS", "all", False),
        ("MPIR_CVAR_NOLOCAL", "1", True),
        ("MPIR_CVAR_NOLOCAL", "0", False),
        ("I_MPI_FABRICS", "ofi", True),
        ("I_MPI_FABRICS", "shm:ofi", False),
    ],
)
def test_settings_that_take_shared_memory_away(name: str, value: str, wrong: bool) -> None:
    found = judge_shared_settings({name: value, "HOME": "/"})
    assert [f.said.partition(":")[0] for f in found] == ([f"{name}={value}"] if wrong else [])


def answer(**changes: Any) -> Answer:
    facts = {"mpi4py": "4", "library": "MPICH Version: 4.0", "loaded": ["/a/libmpi.so.12"], "thread": "serialized"}
    return Answer(0, {**facts, "tag_ub": 2**20, "ulfm": False, "cuda": 1, **changes}, "", "died here")


def test_cuda_awareness_is_tried_where_there_is_a_gpu() -> None:
    def of(found: Answer, *, gpu: bool) -> tuple[Level, str]:
        return next((f.level, f.said) for f in judge_library(found, gpu=gpu) if f.name == "CUDA-aware")

    assert of(answer(), gpu=False)[0] is Level.OK
    assert of(answer(gpu_message=True), gpu=True)[0] is Level.OK
    assert of(answer(gpu_message=False), gpu=True) == (
        Level.WARN,
        "the library says yes; a message between GPU buffers came out wrong",
    )
    assert "ended with: died here" in of(answer(), gpu=True)[1]


def test_a_single_threaded_mpi_is_refused() -> None:
    assert worst(judge_library(answer(thread="single"), gpu=False)) is Level.FAIL
    assert worst(judge_library(answer(), gpu=False)) is Level.OK


def test_a_probe_that_hangs_is_ended_and_what_it_said_stays_known() -> None:
    code = "import time; print('{\"a\": 1}', flush=True); time.sleep(60)"
    found = ask([sys.executable, "-c", code], timeout=1.5)
    assert (found.code, found.facts) == (None, {"a": 1})


def test_lines_say_their_level_in_words_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [ok("a", "fine"), warn("long", "hm", "look"), fail("b", "broken", "mend it")]
    show(findings)
    assert capsys.readouterr().out.splitlines() == [
        "ok    a     fine",
        "warn  long  hm",
        "            -> look",
        "FAIL  b     broken",
        "            -> mend it",
    ]
    assert worst(findings) == 2
