"""Files that are whole or absent, and whether they still are what they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from dynamo_core.config.base import Frozen, NonNegativeInt


class OutputFile(Frozen):
    """Size in bytes and sha256 of one output."""

    size: NonNegativeInt
    sha256: str


def write_atomically(path: Path, text: str) -> None:
    """Write `text` under a temporary name, sync it, rename it to `path`, and sync the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames within `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(folder: Path, files: Mapping[str, OutputFile], *, deep: bool = False) -> str | None:
    """What is wrong with `files` (name relative to `folder` -> what it should be), or None.

    Args:
        deep: compare every file's sha256 as well, not only its presence and size.
    """
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected.size:
            return f"{name} has {size} bytes instead of {expected.size}"
        if deep and file_digest(path) != expected.sha256:
            return f"{name} has changed content"
    return None
