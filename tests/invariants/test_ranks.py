"""One rank or two, whatever the ZeRO stage: the same update, the same allocation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.builders import run_stage, smoke_recipe, stage_folder

ROOT = Path(__file__).parent.parent.parent


def launch(processes: int, module: str, *arguments: str) -> None:
    launcher = (
        [] if processes == 1 else ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    )
    command = [sys.executable, "-m", *launcher, module, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """processes -> what its ranks wrote."""
    found = {}
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp("ranks")
        launch(processes, "tests.invariants.ranks_worker", str(folder))
        found[processes] = folder
    return found


@pytest.fixture(scope="module", params=["zero", "lora"])
def results(request, folders):
    """[processes][ZeRO stage] -> gradients, values, parameters; of a whole model, and of one with adapters."""
    return {
        processes: [torch.load(folder / f"{request.param}{stage}.pt", weights_only=True) for stage in (0, 1, 2)]
        for processes, folder in folders.items()
    }


def test_two_ranks_have_the_gradient_of_one(results):
    alone, two = results[1][0], results[2][0]
    whole = torch.sqrt(sum(gradient.square().sum() for gradient in alone["gradients"].values()))
    assert whole > 1e-3
    for name, gradient in alone["gradients"].items():
        difference = (two["gradients"][name] - gradient).norm()
        assert difference <= 2e-6 * max(gradient.norm(), 1e-2 * whole), name
    assert two["values"] == pytest.approx(alone["values"], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_sharded_optimizers_take_the_same_step(results, processes, zero_stage):
    alone, sharded = results[1][0], results[processes][zero_stage]
    assert sharded["values"]["policy/grad_norm"] == pytest.approx(alone["values"]["policy/grad_norm"], rel=1e-5)
    for name, parameter in alone["parameters"].items():
        torch.testing.assert_close(sharded["parameters"][name], parameter, rtol=1e-5, atol=1e-7, msg=name)


def test_two_ranks_allocate_and_answer_as_one(tmp_path):
    recipe = smoke_recipe(
        [
            "stages.reinforced.steps=2",
            "stages.student.steps=1",
            "stages.student.optimizer.warmup_steps=0",
        ]
    )
    for name in ("data", "teacher", "student"):
        run_stage(recipe, name, tmp_path)
    tables = {}
    for processes in (1, 2):
        folder = stage_folder(recipe, "reinforced", tmp_path)
        launch(processes, "dynamo_core.stages", str(folder))
        tables[processes] = [
            row for part in sorted((folder / "tables").glob("allocations-*")) for row in pq.read_table(part).to_pylist()
        ]
        folder.rename(tmp_path / f"reinforced-{processes}")
    first = {count: [row for row in table if row["step"] == 1] for count, table in tables.items()}
    assert first[1] == first[2]
    assert len(first[1]) == 8
