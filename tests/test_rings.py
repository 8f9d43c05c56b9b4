"""The four rings of the design are kept: a file imports only from its own ring and those inside it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stalempi

PACKAGE = Path(stalempi.__file__).parent
STANDARD = set(sys.stdlib_module_names)

PURE = {"errors", "roles", "version"} | {
    f"pipeline.{name}" for name in ("actions", "dryrun", "partition", "queues", "schedules", "sizing")
}
MPI = {"entry", "abort", "transport.collective", "transport.links", "transport.mpi", "transport.probe"}
OUTSIDE = {0: set[str](), 1: {"torch", "torchvision", "numpy", "PIL"}, 2: {"torch", "numpy", "mpi4py"}}


def ring(module: str) -> int:
    """Returns the ring of a module named from the package, as in `policy.base`."""
    top = module.partition(".")[0]
    if not is_module(module):
        return 3  # a public name: whoever asks for it imports the entry, and all the rest
    if top == "policy" or module in PURE:
        return 0
    if module in MPI:
        return 2
    if top in ("bench", "__main__"):
        return 3
    return 1


def is_module(module: str) -> bool:
    place = PACKAGE.joinpath(*module.split("."))
    return module != "" and (place.is_dir() or place.with_suffix(".py").exists())


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports at run time, inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(child) for node in for_types for part in node.body for child in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                is_member = node.module == "stalempi" or is_module(member.removeprefix("stalempi."))
                yield member if is_member else node.module


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_imports_only_from_its_ring_and_those_inside(path: Path) -> None:
    mine = ring(module_name(path))
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "stalempi":
            # the edge, and the entry of a program, speak to the package by its public names
            assert ring(rest) <= mine, f"{module_name(path)} (ring {mine}) imports {name} (ring {ring(rest)})"
        elif mine < 3:
            assert top in STANDARD | OUTSIDE[mine], f"{module_name(path)} (ring {mine}) imports {name}"


def test_imports_in_functions_and_of_submodules_are_seen_and_those_for_types_are_not(tmp_path: Path) -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import numpy
else:
    import json
from stalempi.transport import mpi
from stalempi.policy import ASP
from stalempi import init, abort
def late():
    from mpi4py import MPI
    import stalempi
"""
    path = tmp_path / "some.py"
    path.write_text(source, encoding="utf-8")
    seen = ["typing", "json", "stalempi.transport.mpi", "stalempi.policy", "stalempi.init", "stalempi.abort"]
    assert sorted(imports(path)) == sorted([*seen, "mpi4py", "stalempi"])
    assert [ring(name) for name in ("transport.mpi", "policy", "init", "abort", "", "flat")] == [2, 0, 3, 2, 3, 1]


def test_a_pure_file_has_no_clock_and_no_global_randomness() -> None:
    for path in FILES:
        if ring(module_name(path)) == 0:
            assert not {"time", "random", "datetime", "threading", "os"} & set(imports(path)), path


def test_importing_the_package_does_not_start_mpi() -> None:
    code = "import stalempi, sys; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
