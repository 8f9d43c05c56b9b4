"""Stores checkpoints: folders of torch files, each folder whole or absent whatever ends the program.

    DIR/checkpoint-000007/manifest.json     format, version, size of every part
                          model.pt ...      the parts
    DIR/.partial-checkpoint-000008/         being written; removed when the next one begins

Order of writing: each part and the manifest are flushed to the disk, then their folder, then the folder is renamed,
then DIR is flushed. So a folder without the prefix has everything that its manifest names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from stalempi.errors import ConfigError

__all__ = ["VERSION", "CheckpointStore"]

VERSION = 1
_FORMAT = "stalempi-checkpoint"
_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class CheckpointStore:
    """The checkpoints in one folder, which belong to one run.

    One rank calls `begin`; then any ranks that share the folder call `write_part`, each part by one of them; when all
    parts are there (a barrier, or a message), one rank calls `commit`. Names sort by age: `next_name` gives such names.

    Args:
        folder: made where it is missing.
        keep: how many checkpoints a commit leaves, itself included.

    Raises ConfigError if the folder cannot be made or written, or if `keep` is below 1.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep} checkpoints: keep at least 1")
        self.folder, self.keep = Path(folder), keep
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"checkpoint folder {folder} cannot be made ({error.strerror}): choose another") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise ConfigError(f"checkpoint folder {folder} cannot be written: choose another")

    def begin(self, name: str) -> None:
        """Removes what earlier writers abandoned and makes the place of the parts of `name`."""
        assert _NAME.fullmatch(name), f"{name!r} is no name for a checkpoint"
        for abandoned in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        self._partial(name).mkdir()

    def write_part(self, name: str, part: str, value: Any) -> None:
        """Writes `value` (tensors, numbers, strings and containers of them) as the part `part` and flushes it."""
        with self._partial(name).joinpath(f"{part}.pt").open("wb") as file:
            torch.save(value, file)
            _flush(file)

    def commit(self, name: str) -> Path:
        """Makes the parts written since `begin` the newest checkpoint, removes the oldest ones, returns its folder."""
        partial, final = self._partial(name), self.folder / name
        sizes = {path.name: path.stat().st_size for path in sorted(partial.glob("*.pt"))}
        manifest = {"format": _FORMAT, "version": VERSION, "parts": sizes}
        with partial.joinpath(_MANIFEST).open("wb") as file:
            file.write(json.dumps(manifest, indent=2).encode() + b"\n")
            _flush(file)
        _flush_folder(partial)
        if final.exists():
            self._remove(final)
        partial.rename(final)
        _flush_folder(self.folder)
        for old in self.whole()[: -self.keep]:
            self._remove(old)
        return final

    def whole(self) -> list[Path]:
        """Returns the folders of the checkpoints here that are whole, oldest first."""
        return [path for path in sorted(self.folder.iterdir()) if _NAME.fullmatch(path.name) and _is_whole(path)]

    def newest(self) -> Path | None:
        """Returns the newest whole checkpoint; None if there is none."""
        return next(reversed(self.whole()), None)

    def next_name(self) -> str:
        """Returns the name of the checkpoint after the newest."""
        numbers = [int(path.name.rpartition("-")[2]) for path in self.folder.glob("checkpoint-*") if _is_numbered(path)]
        return f"checkpoint-{max(numbers, default=0) + 1:06d}"

    def _partial(self, name: str) -> Path:
        return self.folder / f"{_PARTIAL}{name}"

    def _remove(self, path: Path) -> None:
        """Renames before it removes, so that no half of a checkpoint ever bears its name."""
        doomed = self.folder / f"{_PARTIAL}old-{path.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    @staticmethod
    def find(path: Path) -> Path:
        """Returns the checkpoint that `path` is, or the newest in the folder `path`.

        Raises ConfigError if there is none, or if it is damaged, foreign or of a later version.
        """
        if not path.is_dir():
            raise ConfigError(f"there is no checkpoint {path}: give its folder, or the folder that holds checkpoints")
        if (path / _MANIFEST).exists():
            check(path)
            return path
        found = [each for each in sorted(path.iterdir()) if _NAME.fullmatch(each.name) and _is_whole(each)]
        if not found:
            raise ConfigError(f"{path} holds no checkpoint, and is none")
        check(found[-1])
        return found[-1]

    @staticmethod
    def load_part(path: Path, part: str) -> Any:
        """Loads one part of the checkpoint `path` to the CPU; ConfigError if it is damaged or not there."""
        file = path / f"{part}.pt"
        with _damaged(file):
            # torch itself does not look at the checksums that it writes
            if zipfile.ZipFile(file).testzip() is not None:
                raise ConfigError(f"{file} is damaged (a checksum is wrong): remove {path} to use an older checkpoint")
            return torch.load(file, map_location="cpu", weights_only=True)


def check(path: Path) -> None:
    """Raises ConfigError if the folder `path` is not a whole checkpoint that this version can read."""
    with _damaged(path / _MANIFEST):
        manifest: Mapping[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            raise ConfigError(f"{path} is no checkpoint of stalempi: its format is {manifest['format']!r}")
        if manifest["version"] > VERSION:
            raise ConfigError(
                f"checkpoint {path} has version {manifest['version']}, this stalempi reads up to {VERSION}: update it"
            )
        for name, size in manifest["parts"].items():
            if (path / name).stat().st_size != size:
                raise ConfigError(f"{path / name} is damaged (its size): remove {path} to use an older checkpoint")


def _is_whole(path: Path) -> bool:
    """Whether `path` has a manifest and all that it names; a later version counts, so that `check` can refuse it."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        return all((path / name).stat().st_size == size for name, size in manifest["parts"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_numbered(path: Path) -> bool:
    return path.name.rpartition("-")[2].isdecimal()


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong with a file into one line about it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        why = str(error).split("\n", maxsplit=1)[0] or type(error).__name__
        raise ConfigError(f"{path} cannot be read as part of a checkpoint ({why})") from None


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)
