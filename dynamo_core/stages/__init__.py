"""Stages: each is a function of a folder that holds spec.json, and leaves manifest.json behind.

`run(folder)` works in-process, for tests and notebooks; `python -m dynamo_core.stages <folder>` is the process that
a recipe run launches. Importing this package imports no stage, so that data stages never load torch's companions.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

from dynamo_core.stages.context import StageContext
from dynamo_core.stages.manifest import CHECKPOINTS, MANIFEST, UNLISTED, write_manifest

KEPT = UNLISTED - {MANIFEST, "error.json"}
"""Files that outlive an attempt."""
RESUMED = frozenset({CHECKPOINTS, "metrics.jsonl", "tables"})
"""What an attempt goes on from, where the one before left a checkpoint."""


def run(folder: Path) -> None:
    """Run the stage in `folder` on this rank; rank 0 writes its manifest.

    Raises:
        DynamoError: with the exit code that its kind carries.
    """
    context = StageContext.open(folder)
    module = importlib.import_module(f"dynamo_core.stages.{context.spec.stage.type}")
    try:
        metrics = module.run(context)
    finally:
        context.metrics.close()
    if context.rank == 0:
        write_manifest(folder, context.spec.key, metrics, context.spec.versions)
        remove_checkpoints(folder)  # only now: until here they are the way back


def remove_checkpoints(folder: Path) -> None:
    """Of a stage that is finished."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
