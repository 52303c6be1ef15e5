"""Cache keys, verified hits, and one lock a key.

A key is the sha256 of everything that can change a stage's result: its resolved configuration, the seed, the payload
digests of its inputs, the content of files that it reads from outside the store, its code and the libraries. Paths
and time limits do not enter it, nor do names of earlier stages, but for the labels of an evaluation's models. A hub id
enters by name: pin its content by downloading it into a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo_core.config.base import Frozen
from dynamo_core.config.data import MessagesSource
from dynamo_core.config.models import PretrainedModel
from dynamo_core.config.recipe import MODEL_STAGES, Recipe
from dynamo_core.config.stages import PrepareDataStage, Stage
from dynamo_core.errors import RecipeError
from dynamo_core.files import file_digest, find_damage, write_atomically
from dynamo_core.stages.manifest import CHECKPOINTS, MANIFEST, Manifest, read_manifest
from tasks.code import code_digest
from tasks.store import Store

KEY_SCHEMA: Final = 1
VERSIONED: Final = ("torch", "transformers", "tokenizers", "peft", "bitsandbytes", "deepspeed", "numpy", "pyarrow")
_REFERENCES: Final = ("model_from", "data_from", "teacher_from")
_POLL_SECONDS: Final = 0.2


def library_versions() -> dict[str, str]:
    """Library -> installed version, of those that change results."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def stage_key(recipe: Recipe, name: str, inputs: Mapping[str, str]) -> str:
    """The cache key of stage `name` of a resolved recipe: 64 hex digits.

    Args:
        inputs: input role -> payload digest of the producer.

    Raises:
        RecipeError: a file that the stage reads from outside the store is missing.
    """
    stage = recipe.stages[name]
    content = {
        "schema": KEY_SCHEMA,
        "stage": _result_config(stage),
        "seed": recipe.seed,
        "inputs": dict(inputs),
        "code": code_digest(f"dynamo_core.stages.{stage.type}"),
        "versions": library_versions(),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _result_config(stage: Stage) -> dict[str, Any]:
    """The part of a stage's configuration that can change its result; outside files by content, not by path."""
    config = stage.model_dump(mode="json", exclude={*_REFERENCES})
    config["resources"].pop("timeout_minutes")
    checkpoints = config.pop("checkpoints", None)
    if checkpoints and checkpoints["keep_best"]:
        config["checkpoints"] = {name: checkpoints[name] for name in ("every", "keep_best")}
    if isinstance(stage, PrepareDataStage):
        config.pop("resources")  # one process, no arithmetic that depends on threads
        if isinstance(stage.source, MessagesSource):
            config["source"]["path"] = _content_digest(Path(stage.source.path).expanduser())
    if isinstance(stage, MODEL_STAGES) and isinstance(stage.model, PretrainedModel):
        folder = Path(stage.model.path).expanduser()
        if folder.is_dir():
            config["model"]["path"] = _content_digest(folder)
    return config


def _content_digest(path: Path) -> str:
    """Digest of a file, or of a folder's files with their names.

    Raises:
        RecipeError: it cannot be read.
    """
    try:
        if not path.is_dir():
            return f"sha256:{file_digest(path)}"
        files = {file.relative_to(path).as_posix(): file_digest(file) for file in path.rglob("*") if file.is_file()}
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}") from error
    return f"sha256:{hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()}"


@dataclass(frozen=True)
class Hit:
    """A finished stage folder whose outputs are all there."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Miss:
    """Why a stage has to run."""

    reason: str


class StageReference(Frozen):
    """What one key led to: all that later stages and runs need to know. `folder` is absolute."""

    name: str
    key: str
    folder: str
    payload_digest: str
    metrics: dict[str, float]
    mlflow_run_id: str | None
    """The run that recorded the computation; none as long as the tracking server has not taken it."""


def read_reference(store: Store, key: str) -> StageReference | None:
    """The reference that was written when `key` was last computed."""
    try:
        return StageReference.model_validate_json(store.reference_file(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_reference(store: Store, reference: StageReference) -> None:
    """Remember what its key led to."""
    write_atomically(store.reference_file(reference.key), reference.model_dump_json(indent=1) + "\n")


def look_up(store: Store, name: str, key: str) -> Hit | Miss:
    """The result for `key`, verified: its manifest is there, and every file with its size.

    A result of another stage's name counts too; the folder of `name` itself is asked first.
    """
    own = store.stage_folder(name, key)
    miss = Miss("never run" if read_reference(store, key) is None else "damaged: its folder is gone")
    for folder in [own, *(other for other in store.stage_folders(key) if other != own)]:
        manifest = read_manifest(folder)
        damage = None if manifest is None else find_damage(folder, manifest.files)
        if manifest is not None and manifest.key == key:
            if damage is None:
                return Hit(folder, manifest)
            miss = Miss(f"damaged: {damage}")
        elif folder == own and folder.is_dir():
            unreadable = manifest is None and (folder / MANIFEST).exists()
            miss = Miss(f"damaged: {MANIFEST} is unreadable" if unreadable else f"did not finish{_way_back(folder)}")
    return miss


def _way_back(folder: Path) -> str:
    saved = sorted((folder / CHECKPOINTS).glob("step-*"))
    return f", goes on after step {int(saved[-1].name.removeprefix('step-'))}" if saved else ""


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock at `path`; call `on_wait` once if another process holds it, then wait for it.

    The kernel releases the lock when its holder dies, however it dies. Children do not inherit it.
    """
    with path.open("a") as file:
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    on_wait()
                    said = True
                time.sleep(_POLL_SECONDS)
        yield  # closing the file releases the lock
