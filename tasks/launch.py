"""Run one stage as a process tree, watch it, and turn the way it ended into an error for people."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from dynamo_core.config.base import Resources
from dynamo_core.config.spec import StageSpec
from dynamo_core.config.stage_base import BaseStage
from dynamo_core.config.stages import PrepareDataStage, Stage
from dynamo_core.errors import DynamoError, StageCrashed
from dynamo_core.stages import KEPT, RESUMED
from dynamo_core.stages.manifest import CHECKPOINTS, Manifest, read_manifest
from tasks.code import ROOT
from tasks.post_mortem import BY_CODE, explain
from tasks.processes import ProcessTree

GRACE_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.2
_NOTE_SECONDS: Final = 2.0
_LAUNCHER_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def resources_of(stage: BaseStage) -> Resources:
    """The resources of a stage of a resolved recipe."""
    return cast(Resources, stage.resources)


def process_count(stage: Stage) -> int:
    """Ranks of a stage. Preparing data is one process, whatever the recipe gives its training stages."""
    return 1 if isinstance(stage, PrepareDataStage) else resources_of(stage).processes


def run_stage_process(folder: Path, spec: StageSpec, watch: Callable[[], None]) -> Manifest:
    """Run the stage of `spec` in `folder`, from a clean start, and return its manifest.

    Args:
        watch: called several times a second while the stage runs, and once after it has ended.

    Raises:
        DynamoError: of the kind that the stage's error.json names.
        StageLost: the process was killed from outside.
        StageCrashed: it died without a word, wrote no manifest, or ran out of time.
    """
    _clear(folder)
    spec.write(folder)
    log = folder / "stage.log"
    start = log.stat().st_size if log.exists() else 0
    tree = ProcessTree(_command(folder, spec), _environment(spec), log)
    try:
        status = _wait(tree, spec, watch)
    finally:
        tree.stop(GRACE_SECONDS)
    watch()
    error = _read_error(folder, spec.name)
    if error is not None:
        raise error
    if status != 0:
        raise explain(spec.name, status, folder, log, start)
    manifest = read_manifest(folder)
    if manifest is None:
        raise StageCrashed(f"stage '{spec.name}' ended without a manifest; full log: {log}")
    return manifest


def _clear(folder: Path) -> None:
    """Remove what an unfinished attempt left, but its log, and its checkpoints with what belongs to them."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = KEPT | RESUMED if (folder / CHECKPOINTS).is_dir() else KEPT
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _command(folder: Path, spec: StageSpec) -> list[str]:
    entry = ["-m", "dynamo_core.stages", str(folder)]
    processes = process_count(spec.stage)
    if processes == 1:
        return [sys.executable, *entry]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *launcher, *entry]


def _environment(spec: StageSpec) -> dict[str, str]:
    """This process's environment with the stage's own threads; the stage sets its other determinism switches."""
    threads = str(spec.resources.threads)
    outer = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    paths = [str(ROOT), *filter(None, [outer.get("PYTHONPATH")])]
    return {
        **outer,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _wait(tree: ProcessTree, spec: StageSpec, watch: Callable[[], None]) -> int:
    """The exit status of the stage's process, once it ends.

    Raises:
        StageCrashed: resources.timeout_minutes is over.
    """
    minutes = spec.resources.timeout_minutes
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    next_note = 0.0
    while (status := tree.poll()) is None:
        now = time.monotonic()
        if deadline is not None and now > deadline:
            raise StageCrashed(
                f"stage '{spec.name}' ran longer than resources.timeout_minutes = {minutes:g} and was stopped",
                "raise the limit or lower its steps",
            )
        if now >= next_note:
            tree.note_members()
            next_note = now + _NOTE_SECONDS
        watch()
        time.sleep(_POLL_SECONDS)
    return status


def _read_error(folder: Path, name: str) -> DynamoError | None:
    """What error.json says, as the error whose exit code it carries."""
    path = folder / "error.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = BY_CODE.get(content["code"], StageCrashed)
        return kind(f"stage '{name}': {content['cause']}", content["remedy"], content["step"])
    except (ValueError, KeyError):  # cut short by a full disk or a kill
        return StageCrashed(f"stage '{name}' failed and its {path} is unreadable")
