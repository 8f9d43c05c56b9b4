"""Judges how Slurm starts ranks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

from stalempi.bench.diagnose.finding import Finding, fail, ok, warn
from stalempi.bench.diagnose.probe import ask

__all__ = ["judge_slurm"]


def judge_slurm(environment: Mapping[str, str]) -> list[Finding]:
    """Finds a step of Slurm whose ranks would not see each other, and says whether srun could do better."""
    if "SLURM_JOB_ID" not in environment:
        return []
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    in_step = "SLURM_STEP_ID" in environment and tasks.isdigit() and int(tasks) > 1
    plugins = _slurm_plugins()
    have = f"srun --mpi=list has {', '.join(plugins) or 'nothing'}" if plugins is not None else "no srun on PATH"
    cure = "start ranks by mpirun inside the allocation"
    if plugins and "pmix" in plugins:
        cure = f"srun --mpi=pmix, or {cure}"
    if in_step and not any(name.startswith(("PMIX_", "PMI_")) for name in environment):
        return [fail("Slurm", f"srun started {tasks} tasks without PMIx: each is alone, size 1 ({have})", cure)]
    if plugins is not None and not any(name.startswith("pmi") for name in plugins):
        return [warn("Slurm", f"this Slurm has no PMIx: {have}", cure)]
    return [ok("Slurm", f"job {environment['SLURM_JOB_ID']}; {have}")]


def _slurm_plugins() -> list[str] | None:
    """Returns what srun --mpi= takes; None without srun."""
    if not shutil.which("srun"):
        return None
    answer = ask(["srun", "--mpi=list"], timeout=20)
    words = re.findall(r"^\s*(?:srun:\s+)?(\w+)\s*$", answer.out + answer.err, re.MULTILINE)
    return sorted(set(words))
