"""The templates of slurm/ are short, sound bash, and take their sizes from Slurm; they travel with the package."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stalempi.bench.slurm import KINDS

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted(path for path in (ROOT / "slurm").iterdir() if path.is_file())
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def below(path: Path) -> str:
    """Returns what nobody is to edit of a template."""
    return path.read_text().partition("# Nothing below")[2]


def test_each_kind_has_its_template() -> None:
    assert {path.name for path in TEMPLATES} == {f"{kind}.sbatch" for kind in KINDS} | {"pbs.sh", "lsf.sh"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_is_short_and_names_sizes_at_its_top_only(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert not re.search(r"(-n|--nodes|--ntasks)[ =]?[0-9]{2,}|#SBATCH|/home/", below(path))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"summary"}))
def test_all_templates_deal_with_a_warning_alike(kind: str) -> None:
    text = (ROOT / "slurm" / f"{kind}.sbatch").read_text()
    assert "--signal=B:USR1@120 --requeue" in text
    for line in ("trap 'warned=1; kill -USR1 \"$job\"' USR1", "--checkpoint-every 60s --resume auto & job=$!"):
        assert line in below(ROOT / "slurm" / f"{kind}.sbatch")


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="no shellcheck here: it comes with the dev extra")
def test_templates_and_scripts_have_nothing_that_shellcheck_minds() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.read_text().startswith("#!/usr/bin/env bash")]
    done = subprocess.run([SHELLCHECK, *TEMPLATES, *scripts], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="no setuptools here to build the package with"
)
def test_a_wheel_holds_the_templates(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("stalempi", "slurm"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, timeout=120, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for kind in KINDS:
            inside = archive.read(f"stalempi/bench/templates/{kind}.sbatch")
            assert inside == (ROOT / "slurm" / f"{kind}.sbatch").read_bytes()
