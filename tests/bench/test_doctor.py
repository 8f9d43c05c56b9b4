"""Doctor names the fault of each of these broken environments."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

import stalempi
from stalempi.bench.launch import find_launcher
from stalempi.bench.main import main
from tests.launch import MPICH, mpirun

Findings: TypeAlias = dict[str, tuple[str, str]]
Examine: TypeAlias = Callable[..., tuple[int, Findings]]

needs_mpich = pytest.mark.skipif(not MPICH, reason="no MPICH beside")
OURS = str(Path(stalempi.__file__).parents[1])


def namespaces_allowed() -> bool:
    return (
        shutil.which("unshare") is not None and subprocess.run(["unshare", "-mu", "true"], check=False).returncode == 0
    )


needs_namespaces = pytest.mark.skipif(not namespaces_allowed(), reason="needs the right to make namespaces")


def parse(text: str) -> Findings:
    """Returns the worst finding of each name: (level, said)."""
    found: Findings = {}
    for line in sorted(json.loads(text)["findings"], key=lambda f: ("ok", "warn", "fail").index(f["level"])):
        found[line["name"]] = (line["level"], line["said"])
    return found


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Examine:
    """Returns what runs doctor in this process, in an environment with some changes; its probes are real processes."""
    for name in [
        n for n in os.environ if n.startswith(("OMPI_", "PMI", "SLURM", "CUDA", "STALEMPI_")) or n == "TMPDIR"
    ]:
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "stalempi.abort", raising=False)  # as in a process that is no rank

    def run(*words: str, **changes: str) -> tuple[int, Findings]:
        for name, value in changes.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["stalempi-bench", "doctor", "--json", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, parse(capsys.readouterr().out)

    return run


def examine_outside(*prefix: str, words: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Findings:
    """Runs doctor in a process of its own, started by other means."""
    command = [*prefix, "-m", "stalempi.bench", "doctor", "--json", *words]
    environment = {**os.environ, "PYTHONPATH": OURS, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.stdout, done.stderr
    return parse(done.stdout)


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def driver(tmp_path: Path) -> str:
    """Returns a PATH on which the GPU driver says that there are two GPUs."""
    put(tmp_path / "bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: Some (UUID: a)'\necho 'GPU 1: Some (UUID: b)'\n")
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


def test_a_sound_machine_has_no_fault(examine: Examine) -> None:
    code, found = examine()
    assert {name for name, (level, _) in found.items() if level == "fail"} == set()
    assert code in (0, 1)  # warnings are this machine's own
    expected = "torch cores memory results GPUs mpi4py launcher transports ULFM CUDA-aware MPI_TAG_UB".split()
    assert set(expected) <= set(found)


@needs_mpich
def test_two_mpi_libraries_in_one_process(examine: Examine) -> None:
    ours = Path(sys.prefix, "lib/libmpi.so.40")
    if not ours.exists():
        pytest.skip("Open MPI is not the wheel's")
    code, found = examine(LD_PRELOAD=f"{MPICH}/lib/libmpi.so.12 {ours}")
    assert code == 2
    assert found["one MPI"][0] == "fail"
    assert "two MPI libraries in one process" in found["one MPI"][1]
    assert "LD_PRELOAD" in found["one MPI"][1]


@needs_mpich
def test_mpirun_of_another_mpi_than_mpi4pys(examine: Examine) -> None:
    code, found = examine("-n", "2", "--launcher", str(find_launcher()), MPI4PY_LIBMPI=f"{MPICH}/lib/libmpi.so.12")
    assert code == 2
    assert found["launcher"][0] == "fail"
    assert "mpi4py uses MPICH 5" in found["launcher"][1]
    assert "world" not in found  # nothing was started


@needs_mpich
@pytest.mark.mpi
def test_a_job_under_the_launcher_of_another_mpi() -> None:
    words, env = ["-m", "stalempi.bench", "doctor", "--json"], {"MPI4PY_LIBMPI": f"{MPICH}/lib/libmpi.so.12"}
    done = mpirun(words, 2, env=env)
    assert done.code == 2, done.err
    (line,) = done.out.splitlines()
    assert parse(line)["world"][0] == "fail"
    assert "Open MPI's launcher started this, but mpi4py uses MPICH 5" in parse(line)["world"][1]


def test_a_library_that_is_no_mpi(examine: Examine) -> None:
    code, found = examine(MPI4PY_LIBMPI="/no/such/libmpi.so")
    assert code == 2
    assert found["MPI library"][0] == "fail"
    assert "MPI4PY_LIBMPI=/no/such/libmpi.so" in found["MPI library"][1]


def test_no_mpi4py(examine: Examine, tmp_path: Path) -> None:
    put(tmp_path / "mpi4py/__init__.py", "raise ImportError('No module named mpi4py')")
    code, found = examine(PYTHONPATH=f"{tmp_path}:{OURS}")
    assert code == 2
    assert found["mpi4py"] == ("fail", "cannot be imported: ImportError: No module named mpi4py")


def test_an_mpi_that_does_not_start(examine: Examine) -> None:
    code, found = examine(OMPI_MCA_pml="nosuch", MPIR_CVAR_CH4_NETMOD="nosuch")
    assert code == 2
    assert found["MPI_Init"][0] == "fail"


def test_no_launcher(tmp_path: Path) -> None:
    """Python lies in a folder without a launcher, and PATH has none."""
    python = tmp_path / "python"
    python.symlink_to(Path(sys.executable).resolve())
    env = {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join([OURS, *site.getsitepackages()])}
    found = examine_outside(str(python), env=env)
    assert found["launcher"][0] == "fail"
    assert "no mpirun or mpiexec found" in found["launcher"][1]


def test_a_forced_fork(tmp_path: Path) -> None:
    put(tmp_path / "sitecustomize.py", "import multiprocessing\nmultiprocessing.set_start_method('fork')\n")
    found = examine_outside(sys.executable, env={"PYTHONPATH": f"{tmp_path}:{OURS}"})
    assert found["start method"][0] == "warn"
    assert "multiprocessing is set to fork" in found["start method"][1]


@pytest.mark.mpi
@pytest.mark.skipif(not shutil.which("taskset") or len(os.sched_getaffinity(0)) < 2, reason="needs taskset and 2 cores")
def test_all_ranks_on_one_core_with_too_many_threads() -> None:
    core = str(min(os.sched_getaffinity(0)))
    env = {"OMP_NUM_THREADS": "4"}
    words = ("-n", "2", "--mpi-args=--oversubscribe")
    found = examine_outside("taskset", "-c", core, sys.executable, words=words, env=env)
    assert found["binding"][0] == "fail"
    assert "all 2 ranks are bound to one core" in found["binding"][1]
    assert "one core" in found["cores"][1]
    assert found["threads"][0] == "warn"
    assert "OMP_NUM_THREADS=4 for each of 2 ranks" in found["threads"][1]


@needs_namespaces
def test_no_room_in_shared_memory_and_no_name(tmp_path: Path) -> None:
    """Three faults of a container at once: a tiny /dev/shm, a full disk, a host name that nobody knows."""
    (tmp_path / "out").mkdir()
    script = f"""
        mount -t tmpfs -o size=1m none /dev/shm && mount -t tmpfs -o size=64k none {tmp_path}/out
        hostname nobody.invalid && head -c 65536 /dev/zero > {tmp_path}/out/full
        exec "$@" """
    words = ("--out", str(tmp_path / "out"))
    found = examine_outside("unshare", "-mu", "sh", "-c", script, "sh", sys.executable, words=words)
    assert found["shared memory"][0] == "fail"
    assert "/dev/shm has 1.0 MiB free" in found["shared memory"][1]
    assert found["results"][0] == "fail"
    assert "No space left" in found["results"][1]
    assert found["host name"][0] == "warn"
    assert "nobody.invalid does not resolve" in found["host name"][1]


def test_no_shared_memory_by_setting(examine: Examine) -> None:
    code, found = examine(OMPI_MCA_btl="self,tcp")
    assert code >= 1
    assert found["shared memory"][0] == "warn"
    assert "OMPI_MCA_btl=self,tcp: ranks of one node have no shared memory" in found["shared memory"][1]


def test_an_unwritable_temporary_folder(examine: Examine) -> None:
    code, found = examine(TMPDIR="/proc/nowhere")
    assert code == 2
    assert found["temporary files"][0] == "fail"
    assert "TMPDIR=/proc/nowhere cannot be written" in found["temporary files"][1]


def test_an_unwritable_place_for_results(examine: Examine) -> None:
    code, found = examine("--out", "/proc/results")
    assert code == 2
    assert found["results"][0] == "fail"


def test_slurm_without_pmix(examine: Examine, tmp_path: Path) -> None:
    put(tmp_path / "bin/srun", "#!/bin/sh\necho 'MPI plugin types are...'\nprintf '\\tnone\\n\\tcray_shasta\\n'\n")
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    code, found = examine(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", **step)
    assert code == 2
    assert found["Slurm"][0] == "fail"
    assert "srun started 4 tasks without PMIx" in found["Slurm"][1]
    assert "cray_shasta, none" in found["Slurm"][1]


def test_a_gpu_that_is_not_there(examine: Examine, driver: str) -> None:
    code, found = examine(PATH=driver, CUDA_VISIBLE_DEVICES="0,7")
    assert code == 2
    assert found["GPUs"][0] == "fail"
    assert "CUDA_VISIBLE_DEVICES=0,7: GPU 7 is not among the 2" in found["GPUs"][1]


def test_gpus_that_are_hidden(examine: Examine, driver: str) -> None:
    code, found = examine(PATH=driver, CUDA_VISIBLE_DEVICES="")
    assert code == 2
    assert found["GPUs"] == ("fail", "CUDA_VISIBLE_DEVICES='' hides all 2 GPUs of this node")


def test_a_torch_without_cuda_on_a_gpu_node(examine: Examine, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    code, found = examine(PATH=driver)
    assert code == 2
    assert found["GPUs"] == ("fail", "2 here, but torch is built without CUDA")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "1"], "-n 1: a job needs at least 2 ranks"),
        (["--hosts", "a"], "say how many ranks to start"),
        (["-n", "2", "--hosts", "a:1"], "--hosts has places for 1"),
    ],
)
def test_bad_input_is_said_in_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "stalempi.abort", raising=False)
    monkeypatch.setattr(sys, "argv", ["stalempi-bench", "doctor", "--dry-run", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    streams = capsys.readouterr()
    assert ended.value.code == 2
    assert said in streams.err
    assert len(streams.err.splitlines()) == 1


@needs_mpich
@pytest.mark.mpi
def test_a_job_under_mpirun_is_looked_at_from_inside() -> None:
    done = mpirun(["-m", "stalempi.bench", "doctor", "--json"], 3, mpich=True, timeout=100)
    assert done.code in (0, 1), done.err
    (line,) = done.out.splitlines()
    found = parse(line)
    assert found["world"] == ("ok", "3 ranks")
    assert found["round trips within a node"][1].startswith("3 pairs")
    assert "to the server" in found
