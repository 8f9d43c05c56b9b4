"""A rank that fails ends the job within seconds, with one message, however the program was started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import MPICH, Finished, mpirun

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("programs") / "fails.py"

# The issue allows 10 s from the failure on; starting up (importing torch on busy cores) is given the rest.
LIMIT = 30.0


def fail(way: str, rank: int, **options: object) -> Finished:
    done = mpirun(PROGRAM, max(2, rank + 1), way, str(rank), timeout=LIMIT, **options)  # type: ignore[arg-type]
    assert done.code is not None, f"the job hung\n{done.out}\n{done.err}"
    return done


@pytest.mark.parametrize(("way", "rank"), [("raise", 0), ("raise", 2), ("early", 1), ("observe", 0), ("thread", 1)])
def test_an_exception_on_one_rank_shows_its_traceback_once(way: str, rank: int) -> None:
    done = fail(way, rank)
    assert done.code != 0
    assert done.err.count("Traceback") == 1, done.err
    assert done.err.count("ValueError: boom") == 1
    where = {"early": "", "observe": " (server) step 1"}.get(way, " (worker 1) step 4" if rank == 2 else "")
    assert f"rank {rank}{where}" in done.err


@pytest.mark.skipif(MPICH is None, reason="no MPICH here: scripts/test puts one in .mpich")
def test_an_exception_ends_the_job_under_mpich_too() -> None:
    done = fail("raise", 2, mpich=True)
    assert done.code != 0
    assert done.err.count("ValueError: boom") == 1


@pytest.mark.parametrize(
    ("way", "rank"), [("exit", 0), ("exit", 1), ("systemexit", 0), ("systemexit", 2), ("thread exit", 1)]
)
def test_an_exit_status_ends_the_job(way: str, rank: int) -> None:
    done = fail(way, rank)
    assert done.code not in (None, 0)
    assert "Traceback" not in done.err
    assert done.out == ""


def test_an_exit_that_somebody_catches_ends_nothing() -> None:
    done = fail("caught", 1)
    assert done.code == 0, done.err
    assert done.out.count("ended") == 2


def test_a_server_that_never_serves_is_told_so() -> None:
    done = fail("noserve", 0)
    assert done.code == 2
    assert "optimizer.serve()" in done.err
    assert "Traceback" not in done.err


def test_a_worker_that_forgets_to_close_is_closed() -> None:
    done = fail("noclose", 1)
    assert done.code == 0, done.err
    assert done.out.count("ended") == 2


def test_a_model_that_differs_between_ranks_is_shown_as_a_difference() -> None:
    done = fail("shape", 2)
    assert done.code == 2
    assert done.err.count("stalempi: error:") == 1
    assert "rank 2 has 'parameter weight (6, 4) float32" in done.err
    assert "where rank 0 has 'parameter weight (5, 4) float32" in done.err
    assert "Traceback" not in done.err


def test_a_policy_that_differs_between_ranks_is_shown_as_a_difference() -> None:
    done = fail("policy", 1)
    assert done.code == 2
    assert "rank 1 has 'policy ssp(bound=3)' where rank 0 has 'policy ssp(bound=2)'" in done.err


def test_a_gradient_that_is_not_a_number_names_worker_and_step() -> None:
    done = fail("nan", 2)
    assert done.code == 1
    assert "worker 1 pushed a gradient with NaN or infinity at step 1" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("way", "said"),
    [("silent", "worker 0 (rank 1) has been silent"), ("absent", "rank(s) 1 did not join within 3 s")],
)
def test_a_silent_rank_is_noticed_by_a_deadline(way: str, said: str) -> None:
    done = fail(way, 1, env={"STALEMPI_STALL_TIMEOUT": "3"})
    assert done.code != 0
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_world_of_one_says_what_to_do() -> None:
    done = mpirun(["-c", "import stalempi; stalempi.init()"], 1)
    assert done.code == 2
    assert "start it with mpirun -n 2 or more" in done.err


@pytest.mark.parametrize(
    ("variable", "cure"), [("SLURM_NTASKS", "srun --mpi=pmix"), ("PMI_SIZE", "the mpirun of the MPI library")]
)
def test_ranks_that_believe_to_be_alone_are_told_the_cure(variable: str, cure: str) -> None:
    done = mpirun(["-c", f"import os; os.environ['{variable}'] = '4'; import stalempi; stalempi.init()"], 1)
    assert done.code == 2
    assert cure in done.err
