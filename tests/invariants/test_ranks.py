"""One rank or two, whatever the ZeRO stage: the same update, the same allocation."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.builders import read_metrics, run_stage, smoke_recipe, stage_folder, with_dpo
from tests.invariants.ranks_worker import ADAM, ADAM_VARIED, HALF, PLAIN, VARIED, Case

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
def results(tmp_path_factory):
    """(processes, case) -> values and parameters of three updates."""
    folders = {}
    for processes in (1, 2):
        folders[processes] = tmp_path_factory.mktemp("ranks")
        launch(processes, "tests.invariants.ranks_worker", str(folders[processes]))
    return lambda processes, case: torch.load(folders[processes] / case.name, weights_only=True)


def moves(result) -> list[dict[str, torch.Tensor]]:
    """How far each step moved each parameter: the gradient times the learning rate, under SGD."""
    states = result["states"]
    return [{name: after[name] - before[name] for name in after} for before, after in pairwise(states)]


def norm(tensors) -> torch.Tensor:
    return torch.sqrt(sum(tensor.double().square().sum() for tensor in tensors))


EVERY = [*((1, case) for case in VARIED), *((2, case) for case in [*PLAIN, *VARIED])]


@pytest.mark.parametrize(("processes", "case"), EVERY, ids=lambda value: getattr(value, "name", str(value)))
def test_gradients_do_not_depend_on_how_they_are_computed(results, processes, case):
    expected, found = results(1, Case(case.preset, lora=case.lora, moe=case.moe)), results(processes, case)
    for step, (ours, theirs) in enumerate(zip(moves(found), moves(expected), strict=True)):
        for network in {name.partition(".")[0] for name in theirs}:
            here = {name: move for name, move in theirs.items() if name.startswith(network)}
            whole = norm(here.values())
            assert whole > 1e-5, "nothing moved: the test would see nothing"
            for name, move in here.items():
                # Moves are differences of float32 weights: their own rounding counts besides the gradient's.
                rounding = 2**-23 * norm([expected["states"][step][name]])
                allowed = 2e-6 * max(norm([move]), 1e-2 * whole) + rounding
                assert norm([ours[name] - move]) <= allowed * (1 if step == 0 else 5), (step, name)
    for name, parameter in expected["states"][-1].items():
        torch.testing.assert_close(found["states"][-1][name], parameter, rtol=1e-6, atol=1e-6, msg=name)
    for ours, theirs in zip(found["values"], expected["values"], strict=True):
        if case.zero_stage == 3:  # other entries are looked at: those of shards
            assert ours.pop("policy/update_rms") == pytest.approx(theirs.pop("policy/update_rms"), rel=0.5)
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)


ADAM_EVERY = [*((1, case) for case in ADAM_VARIED), *((2, case) for case in [*ADAM, *ADAM_VARIED])]


@pytest.mark.parametrize(("processes", "case"), ADAM_EVERY, ids=lambda value: getattr(value, "name", str(value)))
def test_adam_takes_the_same_three_steps(results, processes, case):
    expected, found = results(1, Case(case.preset, adam=True)), results(processes, case)
    start = expected["states"][0]
    for name, parameter in expected["states"][-1].items():
        update = norm([parameter - start[name]])
        rounding = 2**-23 * norm([parameter])
        assert norm([found["states"][-1][name] - parameter]) <= 1e-4 * update + rounding, name


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_bfloat16_moves_the_same_way_on_two_ranks(results, case):
    """Numbers of eight bits: sums over two ranks round otherwise, the direction of a step stays."""
    full, one, two = (
        moves(results(processes, which))[0] for processes, which in ((1, Case(case.preset)), (1, case), (2, case))
    )
    for network in ("actor", "critic"):
        names = [name for name in one if name.startswith(network)]
        whole = norm([full[name] for name in names])
        assert all(one[name].dtype == torch.float32 for name in names)
        assert norm([two[name] - one[name] for name in names]) <= 0.03 * whole
        assert norm([one[name] - full[name] for name in names]) <= 0.05 * whole


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


def test_two_ranks_learn_preferences_as_one(tmp_path):
    """Three pairs, one at a time: the second rank's last micro-batch is empty."""
    short = smoke_recipe(["stages.teacher.steps=5", "stages.teacher.optimizer.warmup_steps=0"])
    recipe = with_dpo(short, steps=4, batch_size=3, micro_batch_size=1)
    for name in ("data", "teacher"):
        run_stage(recipe, name, tmp_path)
    values = {}
    for processes in (1, 2):
        folder = stage_folder(recipe, "preferred", tmp_path)
        launch(processes, "dynamo_core.stages", str(folder))
        values[processes] = [line["values"] for line in read_metrics(folder)]
        folder.rename(tmp_path / f"preferred-{processes}")
    assert values[1][-1]["preference/margin"] != 0
    for alone, two in zip(values[1], values[2], strict=True):
        assert two == pytest.approx(alone, rel=1e-3, abs=1e-5)
