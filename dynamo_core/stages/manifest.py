"""manifest.json: written last and atomically, so a folder that has one is finished.

It lists every output file with size and sha256, the final metrics, the versions, and the payload digest: a sha256
over the sorted (relative path, sha256) of `model/` and `data/` alone. Logs, metrics, tables and latencies never
enter it, so that a recomputed but equal output leaves later stages cached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from dynamo_core.config.base import Frozen
from dynamo_core.files import OutputFile, file_digest, write_atomically

MANIFEST = "manifest.json"
PAYLOAD_FOLDERS = ("model", "data")
CHECKPOINTS = "checkpoints"
UNLISTED = frozenset({MANIFEST, "spec.json", "error.json", "stage.log"})
"""Files of a stage folder that are not outputs of the stage."""


class Manifest(Frozen):
    """What a finished stage left behind. File names are relative to its folder, with forward slashes."""

    key: str
    payload_digest: str
    metrics: dict[str, float]
    files: dict[str, OutputFile]
    versions: dict[str, str] = Field(default_factory=dict)


def payload_digest(files: Mapping[str, OutputFile]) -> str:
    """Digest of the outputs that later stages read (module docstring)."""
    payload = sorted((name, file.sha256) for name, file in files.items() if name.split("/")[0] in PAYLOAD_FOLDERS)
    return hashlib.sha256(json.dumps(payload).encode()).hexdigest()


def output_files(folder: Path) -> Iterator[Path]:
    """Every output of a stage folder, in a fixed order; checkpoints, temporary and unlisted files left out."""
    for path in sorted(folder.rglob("*")):
        if path.relative_to(folder).parts[0] == CHECKPOINTS:
            continue
        if path.is_file() and path.name not in UNLISTED and not path.name.endswith(".tmp"):
            yield path


def write_manifest(folder: Path, key: str, metrics: Mapping[str, float], versions: Mapping[str, str]) -> Manifest:
    """Digest all outputs in `folder` and write its manifest."""
    files = {
        path.relative_to(folder).as_posix(): OutputFile(size=path.stat().st_size, sha256=file_digest(path))
        for path in output_files(folder)
    }
    manifest = Manifest(
        key=key, payload_digest=payload_digest(files), metrics=dict(metrics), files=files, versions=dict(versions)
    )
    write_atomically(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`, or None where the stage is unfinished or the file is unreadable."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
