"""Runs of a stage that are interrupted, and what must be equal afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dynamo_core.config.recipe import Recipe
from dynamo_core.stages.manifest import read_manifest
from tests.builders import read_metrics, smoke_recipe, stage_folder, with_dpo

ROOT = Path(__file__).parent.parent.parent
TRAINING = ("teacher", "student", "reinforced")


def recipe(*overrides: str) -> Recipe:
    """The smoke recipe and a dpo stage, shorter, with many checkpoints; the last one lies just before the end."""
    smoke = smoke_recipe(
        [
            "stages.teacher.steps=19",
            "stages.student.steps=19",
            "stages.reinforced.steps=7",
            "stages.teacher.checkpoints.every=3",
            "stages.student.checkpoints.every=3",
            "stages.reinforced.checkpoints.every=2",
            *overrides,
        ]
    )
    return with_dpo(smoke, steps=13, checkpoints={"every": 3})


def prepare(recipe: Recipe, name: str, inputs: Path, root: Path) -> Path:
    """A fresh folder of stage `name` in `root` whose inputs lie in `inputs`."""
    root.mkdir(parents=True, exist_ok=True)
    for role in recipe.inputs(name).values():
        if not (root / role).exists():
            (root / role).symlink_to(inputs / role)
    shutil.rmtree(root / name, ignore_errors=True)
    return stage_folder(recipe, name, root)


def start(folder: Path, processes: int = 1, arguments: Sequence[str] = ()) -> subprocess.Popen[str]:
    """The stage in processes of its own."""
    launcher = (
        [] if processes == 1 else ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    )
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "tests.faults.worker", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit status, output)."""
    output, _ = process.communicate()
    return process.returncode, output


def run(folder: Path, processes: int = 1, arguments: Sequence[str] = ()) -> tuple[int, str]:
    """Start and wait."""
    return finish(start(folder, processes, arguments))


def outcome(folder: Path) -> dict[str, Any]:
    """Values of every step, the payload's digest, and the state that the last checkpoint holds."""
    manifest = read_manifest(folder)
    assert manifest is not None
    newest = max((folder / "checkpoints").glob("step-*"))
    return {
        "values": [(line["step"], line["values"]) for line in read_metrics(folder)],
        "digest": manifest.payload_digest,
        "step": newest.name,
        "state": {
            path.relative_to(newest).as_posix(): torch.load(path, weights_only=False)
            for path in sorted(newest.rglob("*.pt"))
        },
    }


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Bit for bit, tensors included; what a process measures of itself (paths, times) is not in there."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_equal(found[index], value, f"{where}/{index}")
    elif isinstance(expected, str | int | float | bool | None):
        assert found == expected, where
